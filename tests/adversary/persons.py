"""Steps that a person takes: keep, import, choose, gc. Their records and sweeps are qdc's own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress

from adversary.edits import Step, constant
from adversary.faults import Fault, Killed, striking
from adversary.oracle import Files, digest_of, sense, sources
from adversary.trial import OTHER, STALE, Trial, Wrong
from adversary.troubles import named_output, pending

from qdc.core.errors import QdcError
from qdc.graph.plan import Plan
from qdc.run.keep import choose, import_output, keep
from qdc.store.gc import Policy
from qdc.store.store import Store
from qdc.store.sweep import sweep

PERSONS: dict[str, Step] = {}
BECAUSE = "the adversary says so"


def person(name: str) -> Callable[[Step], Step]:
    def keep_(function: Step) -> Step:
        PERSONS[name] = function
        return function

    return keep_


@person("choose among reruns")
def _choose(trial: Trial, a: int, b: int) -> str:
    key = trial.expect().senses["toss"]
    entries = trial.oracle.ledger[key]
    entry = entries[a % len(entries)]
    with trial.engine.ready():
        store, build, _ = trial.engine.open()
        engine_key = str(build.plan()["toss"].key)
        files = [trial.world.store / "records" / engine_key / f"{n}.json" for n in store.record_numbers(engine_key)]
        number = next(int(path.stem) for path in files if named_output(path) == digest_of(entry.output))
        choose(store, build.plan(), "toss", number, BECAUSE)
    trial.oracle.chosen[key] = entry.n
    trial.settle()
    return f"record {number} of toss counts"


@person("keep")
def _keep(trial: Trial, a: int, b: int) -> str:
    """A person answers for the output that counted until now; what follows from it stays fresh."""
    module, stage = OWN[a % len(OWN)]
    before = trial.expect().outputs[stage]
    said = constant(trial, module, b)
    return f"{said}, and {stage} is {_kept(trial, stage, before)}"


@person("keep after a try that was taken back")
def _keep_again(trial: Trial, a: int, b: int) -> str:
    """The last output is the one that counted last, not the one that was made last."""
    module, stage = OWN[a % len(OWN)]
    first, before = trial.meaning.constants[module], trial.expect().outputs[stage]
    constant(trial, module, 0)
    trial.settle()
    trial.clock.advance()
    trial.meaning.constants[module] = first
    trial.world.write_code(module)
    trial.settle()
    trial.clock.advance()
    constant(trial, module, 1 + b % 7)
    return f"the constant of {module} was tried and taken back, then changed, and {_kept(trial, stage, before)}"


OWN = (("stages/draw", "draw"), ("stages/join", "join"), ("stages/toss", "toss"))


def _kept(trial: Trial, stage: str, before: Files) -> str:
    """Keep `stage`, whose output was `before`; where the store has forgotten which was last, it may refuse."""
    expected = trial.expect()
    stale = expected.senses[stage] in expected.must
    with trial.engine.ready():
        store, build, _ = trial.engine.open()
        try:
            kept = keep(store, build.plan, [stage], BECAUSE)
        except QdcError:
            if not (trial.forgetful and stale):
                raise
            kept = []
    if kept and not stale:
        raise Wrong(OTHER, f"{stage} was fresh and is kept")
    if kept:
        trial.oracle.made(expected.senses[stage], before)
    trial.settle()
    return "kept" if kept else "not kept"


@person("import")
def _import(trial: Trial, a: int, b: int) -> str:
    """An output made elsewhere stands for the stage; what follows is made from it."""
    module, stage = OWN[a % len(OWN)]
    said = constant(trial, module, b)
    meaning, outputs = trial.meaning, trial.expect().outputs
    key = sense(stage, meaning, {role: outputs[source] for role, source in sources(stage, meaning).items()})
    stale = key in trial.expect().must
    folder = trial.root / "elsewhere"
    shutil.rmtree(folder, ignore_errors=True)
    trial.world.put(folder / "value", f"{50 + b}\n".encode())
    with trial.engine.ready():
        store, build, _ = trial.engine.open()
        plan: Plan = build.plan()
        if plan[stage].state == "stale":
            import_output(store, plan, stage, folder, BECAUSE)
            trial.oracle.made(key, (("value", 0o644, f"{50 + b}\n".encode()),))
        if (plan[stage].state == "stale") != stale:
            raise Wrong(OTHER, f"{stage} is {plan[stage].state} before an import")
    trial.settle()
    return f"{said}, and {stage} is imported as {50 + b}"


@person("gc")
def _gc(trial: Trial, a: int, b: int) -> str:
    said = pending(trial, b) if b % 2 else "nothing changed"
    _collect(trial, Policy(keep_builds=1 + a % 3, older_than_s=float(10 * b)))
    trial.settle()
    return f"{said}; gc kept {1 + a % 3} builds"


@person("gc killed")
def _gc_killed(trial: Trial, a: int, b: int) -> str:
    fault = Fault("kill", 1 + a * 12 + b)
    _collect(trial, Policy(keep_builds=1, older_than_s=0.0), fault)
    trial.settle()
    _collect(trial, Policy(keep_builds=1, older_than_s=0.0))
    trial.clock.advance()
    trial.settle()
    return f"gc was killed at call {fault.at}, then ran again"


def _collect(trial: Trial, policy: Policy, fault: Fault | None = None) -> None:
    """Sweep the store. The last build stays whole, and no record stays without its output."""
    trial.forgetful = True
    last = {sense_: trial.oracle.held(sense_, trial.disk) for sense_ in trial.last.senses.values()}
    whole = _whole(trial)
    with trial.engine.ready(), striking(fault or Fault("none"), trial.world.store), suppress(Killed):
        sweep(Store(trial.world.store), policy, trial.clock.now / 10**9)
    here = {
        (trial.keys.get(path.parent.name, ""), named_output(path))
        for path in (trial.world.store / "records").glob("*/*.json")
        if path.stem.isdecimal()
    }
    for key, entries in trial.oracle.ledger.items():
        entries[:] = [entry for entry in entries if (key, digest_of(entry.output)) in here]
    if whole & {(key, digest) for key, digest in here} - _whole(trial):
        raise Wrong(OTHER, "gc left a record without its output")
    for sense_, output in last.items():
        if trial.oracle.held(sense_, trial.disk) != output:
            raise Wrong(STALE, "gc removed what the last build names")


def _whole(trial: Trial) -> set[tuple[str, str]]:
    """Sense and output of every record in the ledger whose tree and files are here."""
    lost, disk = trial.oracle.lost_trees, trial.disk
    return {
        (key, digest_of(entry.output))
        for key, entries in trial.oracle.ledger.items()
        for entry in entries
        if entry.output not in lost
        and (trial.world.store / "trees" / f"{digest_of(entry.output)}.json").is_file()
        and all(disk.has(content) for _, _, content in entry.output)
    }
