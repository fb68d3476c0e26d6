"""Steps that trouble the store: death, a full disk, other builders, damage, a move, lost memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from adversary.driver import Listener, Outcome
from adversary.edits import INSIDE, Step, constant, input_text
from adversary.faults import Fault, Killed, striking
from adversary.oracle import digest_of, sha
from adversary.trial import FRESH, OTHER, STALE, Trial, Wrong

from qdc.core.errors import QdcError
from qdc.store.memo import seen
from qdc.store.store import Store
from qdc.store.verify import remove, verify

TROUBLES: dict[str, Step] = {}
HOUR_NS = 3600 * 10**9


def trouble(name: str) -> Callable[[Step], Step]:
    def keep_(function: Step) -> Step:
        TROUBLES[name] = function
        return function

    return keep_


def pending(trial: Trial, a: int) -> str:
    """An edit that no build has seen yet."""
    return input_text(trial, a, 0) if a % 3 == 0 else constant(trial, INSIDE[a % len(INSIDE)])


def struck(trial: Trial, fault: Fault) -> Outcome:
    """A build that meets a fault; only a death or a clear error may come of it."""
    with striking(fault, trial.world.store):
        outcome = trial.engine.build()
    trial.count.builds += 1
    if outcome.error is not None and not isinstance(outcome.error, Killed | QdcError):
        if isinstance(outcome.error, OSError):
            return outcome  # The command line names the file and the reason.
        raise outcome.error
    return outcome


def _fault(trial: Trial, kind: str, a: int, b: int) -> str:
    said = pending(trial, a)
    expected = trial.expect()
    fault = Fault(kind, 1 + (a * 12 + b) * 2)
    maybe = trial.interrupted(struck(trial, fault), expected)
    trial.clock.advance()
    trial.settle(maybe)
    return f"{said}; {kind} at call {fault.at}{'' if fault.struck else ' (never reached)'} of a build; a build"


@trouble("kill at a step of publishing")
def _kill(trial: Trial, a: int, b: int) -> str:
    return _fault(trial, "kill", a, b)


def killed_for_real(trial: Trial, at: int) -> None:
    """A build of its own process, ended by SIGKILL at call `at`; with 0 at none. Then a build to the end, judged."""
    expected = trial.expect()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        finished = Listener.finished

        def told(self: Listener, name: str, seconds: float, output: str) -> None:
            os.write(writing, f"{name}\n".encode())
            finished(self, name, seconds, output)

        Listener.finished = told  # type: ignore[method-assign]
        struck(trial, Fault("SIGKILL", at))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        recorded = stream.read().split()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) != bool(at):
        raise Wrong(OTHER, f"the process ended with status {status}")
    for stage in recorded:
        trial.oracle.made(expected.senses[stage], expected.outputs[stage])
    trial.clock.advance()
    trial.settle(frozenset(expected.must) - {expected.senses[stage] for stage in recorded})


@trouble("disk full")
def _full(trial: Trial, a: int, b: int) -> str:
    return _fault(trial, "full", a, b)


@trouble("read-only store")
def _read_only(trial: Trial, a: int, b: int) -> str:
    """With nothing to do it is as good as any; with something to do it is a clear error and nothing changes."""
    return _unwritable(trial, a)


@trouble("read-only store of another checkout")
def _other_checkout(trial: Trial, a: int, b: int) -> str:
    """It holds everything, and knows none of this checkout's files by their stat."""
    shutil.rmtree(trial.world.store / "memo")
    trial.forgetful = True
    return _unwritable(trial, a)


def _unwritable(trial: Trial, a: int) -> str:
    outcome = struck(trial, Fault("read-only"))
    if outcome.error is not None or outcome.ran:
        raise Wrong(STALE, f"a read-only store with nothing to do: {outcome.error or outcome.ran}")
    said = pending(trial, a)
    if struck(trial, Fault("read-only")).error is None and trial.expect().must:
        raise Wrong(FRESH, "a build into a read-only store came to its end")
    trial.clock.advance()
    trial.settle()
    return f"{said}, with the store read-only at first"


@trouble("two builders at once")
def _two(trial: Trial, a: int, b: int) -> str:
    """Each stage runs once. Where an object is damaged, the builder that reads it removes it and says so, and the other
    may then say that it is missing: both are errors, not decisions, and the build after them is judged."""
    said = pending(trial, a)
    expected, before, damaged = trial.expect(), len(trial.engine.stages.done), trial.disk.damaged()
    errors = trial.engine.builders(2)
    ran = [expected.senses[stage] for stage in trial.engine.stages.done[before:]]
    if errors:
        for error in errors:
            if not (isinstance(error, QdcError) and error.id in ("store.damaged", "store.missing") and damaged):
                raise error
        trial.settle(frozenset(ran))
        return f"{said}; two builders at once, one of which found an object damaged"
    if sorted(ran) != sorted(expected.must):
        raise Wrong(FRESH if len(ran) < len(expected.must) else STALE, f"two builders ran {len(ran)} stages")
    for key in expected.must:
        for stage, of in expected.senses.items():
            if of == key:
                trial.oracle.made(key, expected.outputs[stage])
    trial.settle()
    return f"{said}; two builders at once"


@trouble("store moved")
def _moved(trial: Trial, a: int, b: int) -> str:
    root = trial.world.root / f"store-{a}-{b}"
    if root != trial.world.store:
        trial.world.move(root)
    trial.settle()
    return f"the store is at {root.name}"


@trouble("memo lost or damaged")
def _memo(trial: Trial, a: int, b: int) -> str:
    """All of it is a cache: losing it costs time only."""
    trial.forgetful = True
    some = sorted(path for path in (trial.world.store / "memo").rglob("*") if path.is_file())
    if a % 3 == 0 or not some:
        shutil.rmtree(trial.world.store / "memo", ignore_errors=True)
        said = "memo is gone"
    else:
        path = some[b % len(some)]
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        said = f"memo/{path.parent.name} lost half a file"
    trial.settle()
    return said


def _some_object(trial: Trial, a: int, b: int) -> Path:
    """An object of the store: half of the time one that the present outputs need."""
    if a % 2:
        objects = sorted((trial.world.store / "objects" / "sha256").glob("*/*"))
        return objects[b % len(objects)]
    outputs = trial.expect().outputs
    contents = sorted({content for files in outputs.values() for _, _, content in files})
    path = trial.disk.path(contents[b % len(contents)])
    return path if path.is_file() else _some_object(trial, 1, b)


def _flip(trial: Trial, path: Path, shown: bool) -> None:
    """Another content of the same size, in place; `shown`: by the file's mtime, which is else set back."""
    data, before = path.read_bytes(), path.stat()
    os.chmod(path, 0o644)
    with path.open("r+b") as stream:
        stream.write(bytes([data[0] ^ 1]) + data[1:])
    os.chmod(path, 0o444)
    trial.oracle.shown.discard(path.name)
    if shown:
        trial.oracle.shown.add(path.name)
    else:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@trouble("object gone or of another size")
def _short(trial: Trial, a: int, b: int) -> str:
    path = _some_object(trial, a, b)
    if a % 3:
        os.chmod(path, 0o644)
        os.truncate(path, path.stat().st_size - 1 if a % 3 == 1 else path.stat().st_size + 1)
    else:
        path.unlink()
    trial.settle()
    return f"object {path.name[:8]} {('is gone', 'is shorter', 'is longer')[a % 3]}"


@trouble("object with a flipped bit")
def _flipped(trial: Trial, a: int, b: int) -> str:
    """Size says nothing. Where the mtime shows it the object is as good as gone; where it was set back, whatever uses
    the object must find it. What made it runs again, and only that."""
    path = _some_object(trial, a, b)
    _flip(trial, path, shown=b % 2 == 0)
    trial.settle()
    trial.clock.advance()
    said = pending(trial, b)
    trial.settle()
    return f"a bit of object {path.name[:8]} flipped; {said}"


@trouble("flipped bit that no stat shows")
def _hidden(trial: Trial, a: int, b: int) -> str:
    """Only `verify` can tell: it must name the object, and the build after it must make it again."""
    path = _some_object(trial, a, b)
    _flip(trial, path, shown=False)
    with trial.engine.ready():
        store = Store(trial.world.store)
        store.memo.learn(path, seen(path), path.name, trial.clock.now + HOUR_NS)
        store.memo.save()
    found = [item for item in verify(trial.world.store) if item.kind == "object"]
    if {item.name for item in found} != trial.disk.damaged():
        raise Wrong(FRESH, f"verify names {found}, the disk has {trial.disk.damaged()}")
    expected = trial.expect()
    named = {trial.keys.get(str(row["key"])) for item in found if item.name == path.name for row in item.stages}
    for stage, sense_ in expected.senses.items():
        if path.name in {sha(content) for _, _, content in expected.outputs[stage]} and sense_ not in named:
            raise Wrong(OTHER, f"verify does not name {stage}, whose output is damaged")
    remove(found)
    trial.settle()
    return f"a bit of object {path.name[:8]} flipped without a trace in its stat; verify; a build"


@trouble("record truncated")
def _record(trial: Trial, a: int, b: int) -> str:
    records = sorted((trial.world.store / "records").glob("*/[0-9]*.json"))
    path = records[(a * 12 + b) % len(records)]
    _forget(trial, path)
    data = path.read_bytes()
    os.chmod(path, 0o644)
    path.write_bytes(data[: len(data) * (b % 5) // 5])
    trial.settle()
    return f"a record lost its end: {path.parent.name[:8]}/{path.name}"


def _forget(trial: Trial, path: Path) -> None:
    """The ledger loses what this record says. A record is told by the stage, its inputs and its output, as written."""
    digest, key = named_output(path), trial.keys.get(path.parent.name, "")
    kept = [entry for entry in trial.oracle.ledger.get(key, []) if digest_of(entry.output) != digest]
    trial.oracle.ledger[key] = kept


def named_output(record: Path) -> str:
    """The tree digest that a record names; nothing where the record is damaged."""
    try:
        return str(json.loads(record.read_bytes())["output"])
    except ValueError:
        return ""


@trouble("tree deleted")
def _tree(trial: Trial, a: int, b: int) -> str:
    outputs = trial.expect().outputs
    stage = sorted(outputs)[(a + b) % len(outputs)]
    (trial.world.store / "trees" / f"{digest_of(outputs[stage])}.json").unlink()
    trial.oracle.lost_trees.add(outputs[stage])
    trial.settle()
    return f"the tree of {stage} is gone"


@trouble("sampled stage that differs on rerun")
def _sampled(trial: Trial, a: int, b: int) -> str:
    """Other dice alone rerun nothing; where its output is lost too, it runs and what follows from it does."""
    trial.meaning.dice = a
    trial.settle()
    if b % 2:
        (_, _, content), *_ = trial.expect().outputs["toss"]
        trial.disk.path(content).unlink()
        trial.settle()
    return f"dice fall on {a}{', and what toss made is lost' if b % 2 else ''}"
