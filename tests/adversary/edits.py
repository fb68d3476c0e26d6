"""Steps that edit the project: with a meaning, or with none. Each says what it did."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from adversary.trial import Trial
from adversary.world import CODE, DATA, OUTSIDE, Meaning, World

from qdc.core.errors import QdcError

Step = Callable[[Trial, int, int], str]
"""Does one step with two numbers to choose by, judges what follows, and returns what it was in words."""
EDITS: dict[str, Step] = {}
INSIDE = tuple(name for name in CODE if name not in OUTSIDE)
STAGES = tuple(name for name in INSIDE if name.startswith("stages/"))
HELPERS = tuple(name for name in INSIDE if not name.startswith("stages/"))
LR = {2e-6: ("2e-6", "0.000002", "2.0e-06", "20e-7", "2E-6"), 3e-6: ("3e-6", "0.000003"), 1e-5: ("1e-5", ".00001")}


class Project(Protocol):
    """What is edited."""

    @property
    def world(self) -> World: ...
    @property
    def meaning(self) -> Meaning: ...


def edit(name: str) -> Callable[[Step], Step]:
    def keep(function: Step) -> Step:
        EDITS[name] = function
        return function

    return keep


def files(trial: Project) -> list[Path]:
    """Every file of the project outside the store, in a fixed order."""
    found = [path for path in trial.world.root.rglob("*") if path.is_file()]
    return sorted(path for path in found if trial.world.store not in path.parents)


def constant(trial: Project, module: str, b: int = 0) -> str:
    """Another constant of the same length, in the same place: no change of size or inode."""
    was = trial.meaning.constants[module]
    trial.meaning.constants[module] = (was + 1 + b % 8) % 10
    trial.world.write_code(module)
    return f"the constant of {module} from {was} to {trial.meaning.constants[module]}"


def note(trial: Project, module: str, part: int) -> None:
    """One more comment (0), docstring (1) or change of style (2)."""
    notes = list(trial.world.notes.get(module, (0, 0, 0)))
    notes[part] += 1
    trial.world.notes[module] = (notes[0], notes[1], notes[2])
    trial.world.write_code(module)


def input_text(trial: Project, a: int, b: int) -> str:
    """Another content of the same size."""
    name = sorted(trial.meaning.inputs)[a % len(trial.meaning.inputs)]
    text, executable = trial.meaning.inputs[name]
    other = str((int(text) - 10 + 1 + b) % 90 + 10)
    trial.meaning.inputs[name] = (other, executable)
    trial.world.write_input(name)
    return f"the input {name} from {text} to {other}"


def data(trial: Project, name: str) -> str:
    trial.meaning.data[name] = (trial.meaning.data[name] + 1) % 10
    trial.world.write_data(name)
    return f"the bytes of {name}"


@edit("touch")
def _touch(trial: Trial, a: int, b: int) -> str:
    some = files(trial)
    path = some[(a * 12 + b) % len(some)]
    os.utime(path)
    trial.settle()
    return f"touched {path.relative_to(trial.world.root)}"


@edit("input or recipe edited again within one tick")
def _tick(trial: Trial, a: int, b: int) -> str:
    """No time passes between the two edits, and no size changes: stat shows the same file twice."""

    def change() -> str:
        if a % 3:
            return input_text(trial, b, 0)
        trial.meaning.k = (trial.meaning.k + 1) % 10
        trial.world.write_recipe()
        return f"k to {trial.meaning.k}"

    return _twice(trial, change)


@edit("code or data edited again within one tick")
def _code_tick(trial: Trial, a: int, b: int) -> str:
    if a % 3:
        return _twice(trial, lambda: constant(trial, INSIDE[b % len(INSIDE)]))
    return _twice(trial, lambda: data(trial, sorted(DATA)[b % len(DATA)]))


def _twice(trial: Trial, change: Callable[[], str]) -> str:
    first = change()
    trial.settle()
    second = change()
    trial.settle()
    return f"{first}, a build, {second}, all within one tick"


@edit("swap the roles of two inputs")
def _roles(trial: Trial, a: int, b: int) -> str:
    roles = trial.meaning.roles
    trial.meaning.roles = {"a": roles["b"], "b": roles["a"]}
    trial.world.write_recipe()
    trial.settle()
    return f"join takes {trial.meaning.roles}"


@edit("swap the contents of two input files")
def _contents(trial: Trial, a: int, b: int) -> str:
    names = sorted(trial.meaning.inputs)
    one, two = names[a % len(names)], names[b % len(names)]
    inputs = trial.meaning.inputs
    inputs[one], inputs[two] = inputs[two], inputs[one]
    for name in (one, two):
        trial.world.write_input(name)
    trial.settle()
    return f"{one} and {two} have each other's contents"


@edit("chmod +x")
def _executable(trial: Trial, a: int, b: int) -> str:
    name = sorted(trial.meaning.inputs)[a % len(trial.meaning.inputs)]
    text, executable = trial.meaning.inputs[name]
    trial.meaning.inputs[name] = (text, not executable)
    os.chmod(trial.world.inputs / name, 0o644 if executable else 0o755)
    trial.settle()
    return f"{name} is {'not ' if executable else ''}executable"


@edit("chmod that changes nothing")
def _mode(trial: Trial, a: int, b: int) -> str:
    some = files(trial)
    path = some[(a * 12 + b) % len(some)]
    os.chmod(path, stat.S_IMODE(path.stat().st_mode) ^ 0o040)
    trial.settle()
    return f"the group may read {path.relative_to(trial.world.root)}, or not"


@edit("rename an input file")
def _rename(trial: Trial, a: int, b: int) -> str:
    name = sorted(trial.meaning.inputs)[a % len(trial.meaning.inputs)]
    new = next(f"n{i}" for i in range(b, 99) if f"n{i}" not in trial.meaning.inputs)
    trial.meaning.inputs[new] = trial.meaning.inputs.pop(name)
    os.rename(trial.world.inputs / name, trial.world.inputs / new)
    trial.settle()
    return f"{name} is {new} now"


@edit("add or remove an input file")
def _files(trial: Trial, a: int, b: int) -> str:
    inputs = trial.meaning.inputs
    if a % 2 and len(inputs) > 1:
        name = sorted(inputs)[b % len(inputs)]
        del inputs[name]
        (trial.world.inputs / name).unlink()
    else:
        name = next(f"sub/m{i}" for i in range(99) if f"sub/m{i}" not in inputs)
        inputs[name] = (str(10 + b), False)
        trial.world.write_input(name)
    trial.settle()
    return f"{name} came or went"


@edit("comment, docstring or formatting")
def _words(trial: Trial, a: int, b: int) -> str:
    module = sorted(CODE)[a % len(CODE)]
    note(trial, module, b % 3)
    trial.settle()
    return f"other {('comments', 'docstrings', 'formatting')[b % 3]} in {module}"


@edit("comment in an empty package file")
def _empty(trial: Trial, a: int, b: int) -> str:
    room = ("stages", "methods", "formats", "core")[a % 4]
    trial.world.put(trial.world.package / room / "__init__.py", f"# note {b}\n".encode())
    trial.settle()
    return f"a comment in {room}/__init__.py"


@edit("constant of a stage")
def _stage(trial: Trial, a: int, b: int) -> str:
    said = constant(trial, STAGES[a % len(STAGES)], b)
    trial.settle()
    return said


@edit("constant of a helper")
def _helper(trial: Trial, a: int, b: int) -> str:
    said = constant(trial, HELPERS[a % len(HELPERS)], b)
    trial.settle()
    return said


@edit("constant that no stage imports")
def _outside(trial: Trial, a: int, b: int) -> str:
    said = constant(trial, OUTSIDE[a % len(OUTSIDE)], b)
    trial.settle()
    return said


@edit("template, engine row or launcher")
def _data(trial: Trial, a: int, b: int) -> str:
    said = data(trial, sorted(DATA)[a % len(DATA)])
    trial.settle()
    return said


@edit("version of a package that matters")
def _package(trial: Trial, a: int, b: int) -> str:
    name = ("torchy", "jsony")[a % 2]
    trial.meaning.packages[name] = f"2.{b}.0"
    trial.world.write_lock()
    trial.settle()
    return f"{name} {trial.meaning.packages[name]}"


@edit("version of a package that does not matter")
def _unused(trial: Trial, a: int, b: int) -> str:
    trial.meaning.packages["unused"] = f"3.{b}.1"
    trial.world.write_lock()
    trial.settle()
    return f"unused {trial.meaning.packages['unused']}"


@edit("another spelling of the same number")
def _spelling(trial: Trial, a: int, b: int) -> str:
    spellings = LR[trial.meaning.lr]
    trial.world.spelling = spellings[a % len(spellings)]
    trial.world.write_recipe()
    trial.settle()
    return f"lr: {trial.world.spelling}"


@edit("order of fields")
def _order(trial: Trial, a: int, b: int) -> str:
    trial.world.order = a
    trial.world.write_recipe()
    trial.settle()
    return f"the recipe's fields in order {a}"


@edit("value of a parameter")
def _parameter(trial: Trial, a: int, b: int) -> str:
    meaning = trial.meaning
    which = ("lr", "count", "k", "faces", "left", "right")[a % 6]
    if which == "lr":
        meaning.lr = sorted(LR)[b % len(LR)]
        trial.world.spelling = LR[meaning.lr][0]
    elif which in meaning.widths:
        meaning.widths[which] = 1 + b
    else:
        setattr(meaning, which, 1 + b)
    trial.world.write_recipe()
    trial.settle()
    return f"{which} by {b}"


@edit("clock going back")
def _clock(trial: Trial, a: int, b: int) -> str:
    """The edit is older than what it edits."""
    trial.clock.back(5 + 20 * (a % 3))
    said = input_text(trial, b, 0) if a % 2 else constant(trial, INSIDE[b % len(INSIDE)])
    trial.settle()
    return f"the clock went back, then {said}"


@edit("same size and restored mtime")
def _restored(trial: Trial, a: int, b: int) -> str:
    """Only ctime tells."""
    if a % 2:
        path = trial.world.inputs / sorted(trial.meaning.inputs)[b % len(trial.meaning.inputs)]
    else:
        path = trial.world.code_path(INSIDE[b % len(INSIDE)])
    before = path.stat()
    said = input_text(trial, b, 0) if a % 2 else constant(trial, INSIDE[b % len(INSIDE)])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    trial.settle()
    return f"{said}, with the old mtime"


@edit("README")
def _readme(trial: Trial, a: int, b: int) -> str:
    root = trial.world.root
    place = (root / "README.md", root / ".git" / "HEAD", trial.world.package / "README.md")[a % 3]
    trial.world.put(place, f"Words, version {b}.\n".encode())
    trial.settle()
    return f"other words in {place.relative_to(root)}"


@edit("qdc's own version and command line")
def _version(trial: Trial, a: int, b: int) -> str:
    trial.world.put(trial.world.package / "cli" / "main.py", f"VERSION = '1.{a}.{b}'\n".encode())
    trial.world.put(trial.world.root / "pyproject.toml", f"version = '1.{a}.{b}'\n".encode())
    trial.settle()
    return f"qdc 1.{a}.{b}"


@edit("code edited before a stage is loaded")
def _during(trial: Trial, a: int, b: int) -> str:
    """The code that runs is not the code that the plan saw: nothing may be recorded as made by the plan's."""
    module = INSIDE[a % len(INSIDE)]
    was = trial.meaning.constants[module]

    def undo() -> None:
        trial.meaning.constants[module] = was
        trial.world.write_code(module)

    return _while(trial, "before", "draw", lambda: constant(trial, module, b), undo)


@edit("data edited while the stage that reads it runs")
def _amid(trial: Trial, a: int, b: int) -> str:
    """A stage reads its data files when it runs, long after it was loaded."""
    name = sorted(DATA)[a % len(DATA)]
    was = trial.meaning.data[name]

    def undo() -> None:
        trial.meaning.data[name] = was
        trial.world.write_data(name)

    return _while(trial, "amid", "pack", lambda: data(trial, name), undo)


def _while(trial: Trial, when: str, stage: str, change: Callable[[], str], undo: Callable[[], None]) -> str:
    """A build of everything, with a change at that point; a build of what is there now; and one of what was there.

    The build that was disturbed may refuse. Whatever it recorded, the others must find right.
    """
    trial.meaning.count = trial.meaning.count % 9 + 1
    trial.meaning.k = (trial.meaning.k + 1) % 10
    trial.world.write_recipe()
    expected, said = trial.expect(), list[str]()

    def once(name: str) -> None:
        if name == stage and not said:
            trial.clock.advance()
            said.append(change())

    setattr(trial.engine.stages, when, once)
    error = trial.engine.build().error
    setattr(trial.engine.stages, when, lambda name: None)
    if error is not None and not isinstance(error, QdcError):
        raise error
    trial.clock.advance()
    maybe = frozenset({*trial.expect().senses.values(), *expected.senses.values()})
    trial.settle(maybe)
    undo()
    trial.clock.advance()
    trial.settle(maybe)
    return f"{said[0] if said else 'nothing'} {when} {stage} ran, a build, and back again"
