"""The ways through a script: where it ends, forks and comes together again, and processes of their own."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from qdc.audit import shell_tree as tree
from qdc.audit.shell_files import Files
from qdc.audit.shell_grammar import commands
from qdc.audit.shell_pieces import Dead, Undecidable, join
from qdc.audit.shell_state import Content, Launch, Mixed, Place, State, Value, merge, unknown

MAX_STEPS, MAX_DEPTH = 20_000, 60


@dataclass
class Frame:
    """A loop, function or sourced file that is being read, and the states in which it was left."""

    kind: str
    left: list[State] = field(default_factory=list)
    again: list[State] = field(default_factory=list)


class Paths:
    """`self.ends` has the states in which the ways through the script ended. Needs `run` from `shell.Shell`."""

    image: Files
    state: State
    file: str
    dialect: str
    guard: int
    steps: int
    depth: int
    frames: list[Frame]
    ends: list[list[State]]
    unsure: Value
    substituted: bool = False
    run: Callable[[Any], None]
    here: Callable[[int], Place]
    lost: Callable[[int, str], Undecidable]

    def tick(self, line: int) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise self.lost(line, f"more than {MAX_STEPS} commands")

    def run_script(self, text: str, path: str, dialect: str, first_line: int = 1) -> None:
        """The commands of a script in the present state, in order; without any the status is 0."""
        ran = False
        before = (self.file, self.dialect)
        self.file, self.dialect = path, dialect
        self.depth += 1
        try:
            if self.depth > MAX_DEPTH:
                raise self.lost(first_line, "scripts inside scripts, too deep")
            for line in commands(text, first_line, bash=dialect == "bash"):
                self.run(line)
                ran = True
            if not ran:
                self.state.status = 0
        except tree.Outside as error:
            raise self.lost(error.line, f"outside of what is read of a shell: {error.what}") from error
        except Mixed as error:
            raise self.lost(first_line, f"{error} depend on a condition that is not known") from error
        finally:
            self.depth -= 1
            self.file, self.dialect = before

    def leave(self, line: int) -> None:
        """An error that ends a shell."""
        self.state.status = 1
        self.end()

    def may_leave(self) -> None:
        """An error that perhaps ends the shell here."""
        state = self.state.copy()
        state.status = 1
        self.ends[-1].append(state)

    def end(self) -> None:
        self.ends[-1].append(self.state.copy())
        raise Dead

    def contained(self, state: State, thunk: Callable[[], None], *, fresh: bool = False) -> State:
        """`thunk` in a process of its own, begun in `state`; what of its end others can see.

        `fresh`: a new program, not a subshell.
        """
        before = (self.state, self.frames, self.guard)
        begun = state.copy()
        self.state, self.frames = state, []
        self.guard = 0 if fresh else self.guard
        self.ends.append([])
        self.depth += 1
        try:
            if self.depth > MAX_DEPTH:
                raise Undecidable(unknown(Place("shell"), "processes inside processes, too deep"))
            thunk()
            self.ends[-1].append(self.state)
        except Dead:
            pass
        except Undecidable as error:
            if error.value.why.startswith("more than"):
                raise
            stray = Launch((error.value,), {}, error.value.place, begun.cwd)
            self.ends[-1].append(
                replace(begun, lost=begun.lost or error.value, launches=(*begun.launches, stray), status=None,
                        out=None if begun.out is None else (error.value,))
            )  # fmt: skip
        finally:
            self.depth -= 1
            ends = self.ends.pop()
            self.state, self.frames, self.guard = before
        bare = [
            replace(end, variables={}, functions={}, options=frozenset(), local=(), positional=(), cwd=begun.cwd)
            for end in ends
        ]
        return merge(bare, self.unsure) if bare else begun

    def adopt(self, end: State, *, background: bool = False) -> None:
        """Take over what another process did: files, programs, output."""
        state = self.state
        old = len(state.launches)
        news = end.launches[old:]
        state.launches = (*state.launches, *(replace(item, background=True) if background else item for item in news))
        if background:
            for path, content in end.files.items():
                if state.files.get(path) != content:
                    state.files[path] = Content("unknown", unknown(content.text.place, "written in the background"))
        else:
            state.files = dict(end.files)
        state.lost = state.lost or end.lost
        state.out = end.out
        state.status = 0 if background else end.status

    def fork(self, thunks: list[Callable[[], None]], why: Value) -> None:
        """Go on in every way; afterwards only what they agree on is known."""
        base, alive = self.state, []
        for thunk in thunks:
            self.state = base.copy()
            try:
                thunk()
                alive.append(self.state)
            except Dead:
                pass
        if not alive:
            raise Dead
        self.state = self.mixed(alive, why)

    def mixed(self, states: list[State], why: Value) -> State:
        try:
            return merge(states, why)
        except Mixed as error:
            raise Undecidable(unknown(why.place, f"{error} depend on a condition that is not known")) from error

    def either(self, answer: bool | None, yes: Callable[[], None], no: Callable[[], None]) -> None:
        if answer is None:
            self.fork([yes, no], self.unsure)
        else:
            (yes if answer else no)()

    def settle(self, answer: bool | int | None) -> None:
        """The status of a condition."""
        self.state.status = None if answer is None else (0 if answer is True else 1 if answer is False else answer)

    def check(self) -> None:
        """`set -e`: a command that failed ends the shell."""
        state = self.state
        if "errexit" not in state.options or self.guard or state.status == 0:
            return
        if state.status is not None:
            self.end()
        self.ends[-1].append(state.copy())
        state.status = 0

    def guarded(self, node: Any) -> None:
        self.guard += 1
        try:
            self.run(node)
        finally:
            self.guard -= 1

    def truth(self, node: Any) -> bool | None:
        """Run a condition."""
        self.guarded(node)
        if self.state.status is None:
            return None
        return self.state.status == 0

    # ---- files and output

    def path(self, value: Value) -> str | None:
        """The absolute real path that a text names; None where it is not known."""
        if value.text is None or (not value.text.startswith("/") and self.state.cwd.text is None):
            return None
        return self.image.real(posixpath.join(self.state.cwd.text or "/", value.text))

    def look(self, path: Value, line: int) -> tuple[str, str]:
        real = self.path(path)
        if real is None or real == "":
            return "unknown", ""
        if real in self.state.files:
            kind = self.state.files[real].kind
            return kind, real
        if self.state.lost is not None:
            return "unknown", real
        parent = posixpath.dirname(real)
        while parent != "/":
            if parent in self.state.files and self.state.files[parent].kind != "dir":
                return "unknown" if self.state.files[parent].kind == "unknown" else "gone", real
            parent = posixpath.dirname(parent)
        return self.image.kind(real), real

    def content(self, path: Value, line: int) -> Value | None:
        """The text of a file as it is now; None if there is no file."""
        kind, real = self.look(path, line)
        if kind in ("gone", "dir"):
            return None
        if kind == "unknown":
            if not path.known:
                return path
            written = self.state.files.get(real)
            return (
                (written.text if written else None) or self.state.lost or unknown(self.here(line), f"the file {real}")
            )
        if real in self.state.files:
            return self.state.files[real].text
        text = self.image.text(real)
        place = Place("file", real, 1)
        return unknown(self.here(line), f"{real} is no text") if text is None else Value(text, place)

    def captured(self, part: tree.Output, line: int) -> Value:
        """The output of `$(..)`, without its last newlines."""
        child = self.state.copy()
        child.out = None if part.process else ()
        if self.dialect == "bash":
            child.options = child.options - {"errexit"}
        outside = self.state.out
        end = self.contained(child, lambda: self.run(part.body))
        self.adopt(end)
        self.substituted = True
        self.state.out = outside
        if part.process:
            return unknown(self.here(line), "a process substitution")
        text = join(list(end.out or ()), self.here(line))
        if text.text is None:
            return unknown(self.here(line), f"a command computes it: {text.why}"[:200], number=text.number)
        return replace(text, text=text.text.rstrip("\n"))

    def emit(self, value: Value) -> None:
        if self.state.out is not None:
            self.state.out = (*self.state.out, value)
