"""What an image starts, and with what settings in force: container, shell scripts, launchers, the engine's own rules.

`effective_configuration` gives every argument of the engine with where it came from and what it beat, or why it
cannot be decided. Nothing of the image is executed.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qdc.audit import launchers
from qdc.audit.container import CONFIGURATION, Arguments, Start, start
from qdc.audit.engine_words import Effective, Setting, effective
from qdc.audit.shell import Shell
from qdc.audit.shell_files import Files, ImageFiles
from qdc.audit.shell_pieces import Dead, Undecidable
from qdc.audit.shell_programs import engine_words
from qdc.audit.shell_state import Launch, Place, State, Value, inherited, unknown
from qdc.formats.oci import Image


@dataclass
class Trace:
    """`ends`: the states in which the first process can end; `undecided`: why nothing at all is known."""

    ends: list[State]
    undecided: Value | None = None


@dataclass
class Engine:
    """One start of the engine. `place`: the line that starts it; `notes`: (place, text) of a launcher's reading."""

    form: str
    place: Place
    words: tuple[Value, ...]
    environment: dict[str, Value]
    result: Effective
    notes: list[tuple[Place, str]] = field(default_factory=list)
    possible: bool = False


@dataclass
class Configuration:
    """`engines`: every start that was found; `result`: what all agree on; `why`: no engine, or it cannot be decided.

    `environment`: what the engine finds there, by name. `together`: the most engines that one way starts for sure.
    """

    start: Start
    engines: list[Engine]
    result: Effective
    environment: dict[str, Value]
    why: Value | None = None
    together: int = 0


def effective_configuration(
    image: Image, run: Arguments | None = None, adapters: list[dict[str, Any]] | None = None
) -> Configuration:
    """What `docker run` of an image starts. `adapters`: launchers as in `launchers.yaml` (default: those)."""
    first = start(image.settings, run)
    files = ImageFiles(image, first.mounts)
    found = trace(files, first, sh=sh_of(files))
    return configuration(files, first, found, adapters)


def sh_of(files: Files) -> str:
    """Which shell /bin/sh is: `dash`, or `sh` where that is not known."""
    return "dash" if posixpath.basename(files.real("/bin/sh")) == "dash" else "sh"


def trace(files: Files, first: Start, *, sh: str) -> Trace:
    """Follow the first process. `sh`: which shell /bin/sh is (`dash`, or `sh` where that is not known)."""
    shell = Shell(files, State(first.cwd, inherited(first.environment)), root=first.root, sh=sh)
    shell.file = CONFIGURATION
    try:
        shell.process(first.words, dict(first.environment), 1)
        shell.ends[-1].append(shell.state)
    except Dead:
        pass
    except Undecidable as error:
        return Trace([], error.value)
    except RecursionError:
        return Trace([], unknown(Place("file", shell.file, 1), "commands inside commands, too deep"))
    return Trace(shell.ends[0])


def configuration(
    files: Files, first: Start, found: Trace, adapters: list[dict[str, Any]] | None = None
) -> Configuration:
    """The engine's settings in all ways that the first process may take."""
    empty = Configuration(first, [], Effective(), {})
    if found.undecided is not None:
        return replace(empty, why=found.undecided)
    engines: list[Engine] = []
    strangers: list[list[tuple[Place, Value]]] = []
    before: set[Place] = set()
    together = 0
    for end in found.ends:
        mine: list[Engine] = []
        strange: list[tuple[Place, Value]] = []
        for launch in end.launches:
            engine, why = _engine(files, launch, adapters)
            if engine is not None:
                mine.append(engine)
            elif why is not None:
                strange.append((launch.place, why))
        if mine:
            before |= {place for place, _ in strange}
        else:
            strangers.append(strange)
        together = max(together, sum(not engine.possible for engine in mine))
        engines += [engine for engine in mine if not any(_alike(engine, other) for other in engines)]
    # A program after which the engine starts elsewhere is taken to prepare it; any other may be what starts it.
    reasons = [why for strange in strangers for place, why in strange[-1:] if place not in before]
    if reasons:
        return replace(empty, engines=engines, why=reasons[0])
    if not engines:
        place = found.ends[0].launches[0].place if found.ends and found.ends[0].launches else Place("ENV")
        text = " ".join(word.text or "?" for word in first.words)[:80] or "nothing"
        return replace(empty, why=unknown(place, f"the image starts `{text}`, and no engine was found in it"))
    result = _agreed([engine.result for engine in engines], [engine.place for engine in engines])
    shared = _shared([engine.environment for engine in engines])
    return Configuration(first, engines, result, shared, None, together)


def _engine(files: Files, launch: Launch, adapters: list[dict[str, Any]] | None) -> tuple[Engine | None, Value | None]:
    """The engine that a launch starts, or why that cannot be decided; neither for one that starts none."""

    def read(path: str) -> Value | None:
        return _content(files, launch, path)

    def given(value: Value) -> Value | None:
        return read(posixpath.join(launch.cwd.text or "/", value.text or ""))

    notes: list[tuple[Place, str]] = []
    form_words = engine_words(launch.words) if launch.engine else None
    if form_words is None:
        made = launchers.command(launch, read, adapters)
        if made.why is not None:
            return None, made.why
        form_words, notes = (made.form, made.words), made.evidence
    form, words = form_words
    return Engine(form, launch.place, words, launch.environment, effective(form, words, given), notes,
                  launch.possible), None  # fmt: skip


def _content(files: Files, launch: Launch, path: str) -> Value | None:
    """The text of a file as it is when a program starts; None if there is none."""
    written, lost = launch.files if launch.files is not None else ({}, None)
    real = files.real(path)
    place = Place("file", real, 1)
    if real in written:
        content = written[real]
        return None if content.kind in ("gone", "dir") else content.text
    if lost is not None:
        return unknown(lost.place, f"{real} may have been changed: {lost.why}")
    kind = files.kind(real)
    if kind in ("gone", "dir"):
        return None
    text = files.text(real) if kind == "file" else None
    return unknown(place, f"{real} is no text of the image") if text is None else Value(text, place)


def _alike(a: Engine, b: Engine) -> bool:
    return (a.place, a.form, [word.text for word in a.words]) == (
        b.place,
        b.form,
        [word.text for word in b.words],
    ) and {name: value.text for name, value in a.environment.items()} == {
        name: value.text for name, value in b.environment.items()
    }


def _agreed(results: Sequence[Effective], places: Sequence[Place]) -> Effective:
    """What several starts of the engine have in common."""
    if len(results) == 1:
        return results[0]
    both = Effective(problems=[problem for result in results for problem in result.problems])
    both.rest = next((result.rest for result in results if result.rest is not None), None)
    for name in sorted({name for result in results for name in result.settings}):
        held = [result.get(name) for result in results]
        first = next(item for item in held if item is not None)
        values = [None if item is None else item.value for item in held]
        if all(item is not None and item.known and item.value == first.value for item in held):
            both.settings[name] = first
            continue
        shown = ", ".join(
            f"{value!r} at {place}" if item is None or item.known else f"not known at {place}"
            for item, value, place in zip(held, values, places, strict=True)
        )
        both.settings[name] = Setting(None, unknown(places[0], f"the engine may start in several ways: {shown}"[:300]))
    return both


def _shared(environments: Sequence[dict[str, Value]]) -> dict[str, Value]:
    first, *rest = environments
    found = {}
    for name in sorted({name for environment in environments for name in environment}):
        held = [environment.get(name) for environment in environments]
        value = next(item for item in held if item is not None)
        same = all(item is not None and item.text == value.text for item in held)
        found[name] = (
            value if same or not rest else unknown(value.place, f"{name} differs between two starts", many=True)
        )
    return found if rest else dict(first)
