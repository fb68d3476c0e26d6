"""The scenarios of benchmarks/freshness.py: edits and troubles of one project, and the oracle's ledger beside them.

They speak of the project alone; a contestant says where its outputs are and how it builds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from adversary import edits
from adversary.oracle import Disk, Expected, Oracle, sha
from contestants import Outcome, Peer, Qdc

Contestant = Peer | Qdc


class Memory(Disk):
    """A store that has everything but what is `lost`."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"))
        self.lost: set[str] = set()
        self.flipped: set[str] = set()

    def has(self, content: bytes) -> bool:
        return sha(content) not in self.lost

    def damaged(self) -> set[str]:
        return self.flipped


class Stand:
    """One scenario with one tool: the tool's project, and the oracle's ledger of what was made in it."""

    def __init__(self, tool: Contestant) -> None:
        tool.reset()
        if isinstance(tool, Peer):
            tool.build()
        self.tool, self.oracle, self.disk = tool, Oracle(), Memory()
        self.outcome: Outcome | None = None
        self.settle(self.expect())

    @property
    def world(self) -> edits.World:
        return self.tool.world

    @property
    def meaning(self) -> edits.Meaning:
        return self.tool.world.meaning

    def expect(self) -> Expected:
        return self.oracle.expect(self.meaning, self.disk)

    def settle(self, expected: Expected) -> None:
        for stage, key in expected.senses.items():
            self.oracle.made(key, expected.outputs[stage])
        self.disk.lost.clear()
        self.disk.flipped.clear()

    def between(self) -> None:
        """A build that is not judged."""
        expected = self.expect()
        self.tool.build()
        self.settle(expected)
        time.sleep(0 if isinstance(self.tool, Qdc) else 1.1)

    def content(self, stage: str) -> str:
        return sha(next(content for path, _, content in self.expect().outputs[stage] if path == "value"))


class NotExpressible(Exception):
    """The tool has no word for it."""


@dataclass(frozen=True)
class Scenario:
    """`act` brings the project to the point where the judged build begins; it may do that build itself."""

    name: str
    act: Callable[[Stand], object]


def code(module: str) -> Callable[[Stand], object]:
    return lambda stand: edits.constant(stand, module)


def words(module: str, part: int) -> Callable[[Stand], object]:
    return lambda stand: edits.note(stand, module, part)


def _recipe(stand: Stand, **values: object) -> None:
    for name, value in values.items():
        setattr(stand.meaning if hasattr(stand.meaning, name) else stand.world, name, value)
    stand.world.write_recipe()


def _touch(stand: Stand) -> None:
    for path in edits.files(stand):
        if {"recipes", "stages", "methods", "serving"} & set(path.parts):
            os.utime(path)


def _package(name: str) -> Callable[[Stand], object]:
    def act(stand: Stand) -> None:
        stand.meaning.packages[name] = "9.0.0"
        stand.world.write_lock()

    return act


def _restored(stand: Stand, change: Callable[[], object], path: Path, back_s: float = 0.0) -> None:
    """`change`, after which the file has the mtime that it had, or an older one."""
    before = path.stat()
    change()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns - int(back_s * 1e9)))


def _swap_contents(stand: Stand) -> None:
    inputs = stand.meaning.inputs
    inputs["one"], inputs["three"] = inputs["three"], inputs["one"]
    for name in ("one", "three"):
        stand.world.write_input(name)


def _executable(stand: Stand) -> None:
    stand.meaning.inputs["one"] = (stand.meaning.inputs["one"][0], True)
    os.chmod(stand.world.inputs / "one", 0o755)


def _rename(stand: Stand) -> None:
    stand.meaning.inputs["zero"] = stand.meaning.inputs.pop("one")
    os.rename(stand.world.inputs / "one", stand.world.inputs / "zero")


def _new_file(stand: Stand) -> None:
    stand.meaning.inputs["sub/new"] = ("44", False)
    stand.world.write_input("sub/new")


def _readme(stand: Stand) -> None:
    stand.world.put(stand.world.root / "README.md", b"Other words.\n")


def _back(stand: Stand) -> None:
    _recipe(stand, count=3)
    stand.between()
    _recipe(stand, count=2)


def _lost(stand: Stand) -> None:
    stand.disk.lost.add(stand.content("join"))
    stand.tool.output("join").unlink()


def _shorter(stand: Stand) -> None:
    stand.disk.lost.add(stand.content("join"))
    path = stand.tool.output("join")
    path.chmod(0o644)
    os.truncate(path, path.stat().st_size - 1)


def _flipped(stand: Stand) -> None:
    """And then what reads the output must run."""
    stand.disk.flipped.add(stand.content("join"))
    path = stand.tool.output("join")
    path.chmod(0o644)

    def flip() -> None:
        data = path.read_bytes()
        with path.open("r+b") as stream:
            stream.write(b"9" if data[:1] != b"9" else b"8")

    _restored(stand, flip, path)
    edits.constant(stand, "stages/pack")


def _kill(stand: Stand) -> None:
    """What had ended stays: `join` and what follows must run."""
    edits.constant(stand, "methods/text")
    expected = stand.expect()
    stand.tool.kill_in("join")
    for stage in ("draw", "left", "right"):
        stand.oracle.made(expected.senses[stage], expected.outputs[stage])


def _two(stand: Stand) -> None:
    edits.constant(stand, "methods/text")
    stand.outcome = stand.tool.build(at_once=2)


def _keep(stand: Stand) -> None:
    before = stand.expect().outputs["join"]
    words("stages/join", 0)(stand)
    edits.constant(stand, "methods/late")
    if not stand.tool.keep("join"):
        raise NotExpressible
    stand.oracle.made(stand.expect().senses["join"], before)


def _first_input(stand: Stand) -> Path:
    return stand.world.inputs / "one"


SCENARIOS = [
    Scenario("nothing changed", lambda stand: None),
    Scenario("touch every file", _touch),
    Scenario("input: same size, other content", lambda s: edits.input_text(s, 0, 0)),
    Scenario(
        "input: same size, mtime restored",
        lambda s: _restored(s, lambda: edits.input_text(s, 0, 0), _first_input(s)),
    ),
    Scenario(
        "input: clock gone back an hour",
        lambda s: _restored(s, lambda: edits.input_text(s, 0, 0), _first_input(s), 3600.0),
    ),
    Scenario("two input files swap contents", _swap_contents),
    Scenario("input: renamed", _rename),
    Scenario("input: a file more", _new_file),
    Scenario("input: chmod +x", _executable),
    Scenario("roles of two inputs swapped", lambda s: _recipe(s, roles={"a": "right", "b": "left"})),
    Scenario("stage: a constant", code("stages/shape")),
    Scenario("helper: a constant", code("methods/text")),
    Scenario("helper of a helper: a constant", code("methods/deep")),
    Scenario("module that no stage imports", code("methods/loose")),
    Scenario("stage: a comment", words("stages/shape", 0)),
    Scenario("stage: a docstring", words("stages/shape", 1)),
    Scenario("helper: formatting", words("methods/text", 2)),
    Scenario("template", lambda s: edits.data(s, "@templates/Dockerfile.j2")),
    Scenario("engine row", lambda s: edits.data(s, "serving/engines.json")),
    Scenario("version of a declared package", _package("torchy")),
    Scenario("version of another package", _package("unused")),
    Scenario("parameter: another value", lambda s: _recipe(s, count=3)),
    Scenario("parameter of the last stage", lambda s: _recipe(s, k=9)),
    Scenario("2e-6 written 0.000002", lambda s: _recipe(s, spelling="0.000002")),
    Scenario("order of the recipe's fields", lambda s: _recipe(s, order=3)),
    Scenario("an edit, a build, taken back", _back),
    Scenario("README", _readme),
    Scenario("project or store moved", lambda s: s.tool.move()),
    Scenario("an output is gone", _lost),
    Scenario("an output is a byte short", _shorter),
    Scenario("a bit of an output flips, mtime restored; then it is read", _flipped),
    Scenario("kill -9 while a stage writes", _kill),
    Scenario("two builders at once", _two),
    Scenario("keep an output after a refactoring", _keep),
]
QUICK = ("nothing changed", "roles of two inputs swapped", "input: chmod +x", "kill -9 while a stage writes")
