"""What an image starts: from its first process through shell scripts to the engine."""

from __future__ import annotations

from dataclasses import dataclass

from qdc.audit.container import CONFIGURATION, Start
from qdc.audit.shell import Shell
from qdc.audit.shell_expand import Dead, Undecidable
from qdc.audit.shell_files import Files
from qdc.audit.shell_state import State, Value, Var


@dataclass
class Trace:
    """`ends`: the states in which the first process can end; `undecided`: why nothing at all is known."""

    ends: list[State]
    undecided: Value | None = None


def trace(files: Files, start: Start, *, sh: str) -> Trace:
    """Follow the first process. `sh`: which shell /bin/sh is (`dash`, or `sh` where that is not known)."""
    variables = {name: Var(value, True) for name, value in start.environment.items()}
    shell = Shell(files, State(start.cwd, variables), root=start.root, sh=sh)
    shell.file = CONFIGURATION
    try:
        shell.process(start.words, dict(start.environment), 1)
        shell.ends[-1].append(shell.state)
    except Dead:
        pass
    except Undecidable as error:
        return Trace([], error.value)
    return Trace(shell.ends[0])
