"""Records that a person answers for: an old output under a new key, an output made elsewhere, one of several reruns.

The reason that was given is in the record, and so in `why`, `show` and every build record.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.spelling import suggestion
from qdc.graph.instances import Instance
from qdc.graph.plan import Plan, Stage
from qdc.graph.table import KINDS
from qdc.store.store import Store

REFACTORED = ("code", "file", "package", "determinism", "scheme")
"""Kinds of reason that a person may answer for: the values and inputs are the same, only what runs was changed."""
MIN_REASON = 8


def keep(store: Store, plan: Callable[[], Plan], names: list[str], because: str, *, all_: bool = False) -> list[str]:
    """Let each stage's last output stand under its present key; returns the names kept, in order.

    `plan()` decides anew, because a kept stage makes the keys of those behind it known. A stage that is fresh already
    is left alone. Raises QdcError for a stage whose values or inputs changed, or that has no earlier output here;
    with `all_` such a stage is passed over.
    """
    _reason(because)
    kept = []
    for name in names:
        try:
            if _keep(store, _stage(plan(), name), because):
                kept.append(name)
        except QdcError:
            if not all_:
                raise
    return kept


def _keep(store: Store, stage: Stage, because: str) -> bool:
    name = stage.instance.name
    if stage.state == "fresh":
        return False
    if stage.key is None:
        waits = ", ".join(str(reason["what"]) for reason in stage.reasons)
        raise _refused("waits", f"the key of `{name}` is not known yet: it waits for {waits}", f"keep {waits} first")
    changed = [reason for reason in stage.reasons if reason["kind"] not in REFACTORED]
    if changed:
        what = ", ".join(str(reason["what"]) for reason in changed[:3])
        raise _refused(
            "changed",
            f"`{name}` would get other values or inputs than its last output was made from: {what}",
            "`keep` is for code that changed without changing what it makes; `qdc build` runs the stage",
        )
    old = store.latest(name)
    if old is None or not store.has_tree(old["output"]):
        raise _refused("nothing", f"there is no whole earlier output of `{name}` in this store", "`qdc build` runs it")
    _add(store, stage, old["output"], old["determinism"], {"kept": {"from": old["key"], "because": because}}, old)
    return True


def choose(store: Store, plan: Plan, name: str, number: int, because: str) -> None:
    """Select one of the records of a sampled stage whose reruns differ. Raises QdcError where there is no such one."""
    _reason(because)
    stage = _stage(plan, name)
    if stage.key is None:
        raise _refused("waits", f"the key of `{name}` is not known yet", "`qdc plan` says what it waits for")
    numbers = store.record_numbers(stage.key)
    if number not in numbers:
        there = ", ".join(map(str, numbers)) or "none"
        raise _refused("record", f"`{name}` has no record {number} under its key", f"there are: {there}")
    store.select(stage.key, number, because)


def import_output(store: Store, plan: Plan, name: str, folder: Path, because: str) -> dict[str, Any]:
    """Take a folder as the output of a stage under its present key; returns the record.

    Raises QdcError where the key is not known, the stage is fresh, or the folder lacks what the stage makes.
    """
    _reason(because)
    stage = _stage(plan, name)
    if stage.key is None:
        waits = ", ".join(str(reason["what"]) for reason in stage.reasons)
        hint = f"build or import {waits} first"
        raise _refused("waits", f"the key of `{name}` is not known yet: it waits for {waits}", hint)
    if stage.state == "fresh":
        raise _refused("fresh", f"`{name}` has an output under this key already", "nothing needs to be imported")
    if not folder.is_dir():
        raise _refused("folder", f"`{folder}` is no folder", "give the folder that holds the stage's output")
    lacking = [path for path in KINDS[stage.instance.kind].makes if not (folder / path).exists()]
    if lacking:
        made = ", ".join(KINDS[stage.instance.kind].makes)
        raise _refused(
            "lacks", f"`{folder}` lacks {', '.join(lacking)}", f"a `{stage.instance.kind}` stage makes {made}"
        )
    return _add(store, stage, store.ingest(folder).digest, "imported", {"imported": {"because": because}}, {})


def _stage(plan: Plan, name: str) -> Stage:
    names = [stage.instance.name for stage in plan.stages]
    if name not in names:
        raise QdcError("keep.stage", f"the recipe has no stage `{name}`", hint=suggestion(name, names, "stages"))
    return plan[name]


def _reason(because: str) -> None:
    if len(because.strip()) < MIN_REASON:
        raise QdcError("keep.because", "the reason is too short to tell anything", hint="--because 'renamed a helper'")


def _add(
    store: Store, stage: Stage, output: str, determinism: str, more: dict[str, Any], old: dict[str, Any]
) -> dict[str, Any]:
    instance: Instance = stage.instance
    value = {
        "instance": instance.name,
        "stage": instance.kind,
        "determinism": determinism,
        "components": instance.components(stage.inputs),
        "output": output,
        "seconds": old.get("seconds", 0.0),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "threads": old.get("threads"),
        "hardware": old.get("hardware"),
        **more,
    }
    return store.add_record(str(stage.key), value)


def _refused(id: str, message: str, hint: str) -> QdcError:
    return QdcError(f"keep.{id}", message, hint=hint, exit_code=COULD_NOT)
