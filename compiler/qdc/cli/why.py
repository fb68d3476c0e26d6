"""`qdc why STAGE WHAT`: why a stage is fresh, stale or waiting, or why it ran in a past build.

WHAT is a recipe (now), or a past build: a build id, `@1`, or the id of a log that `qdc show --logs` lists.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from qdc.cli.common import answer, open_store, parser
from qdc.core.errors import QdcError
from qdc.core.spelling import suggestion
from qdc.graph.plan import Plan, plan
from qdc.report.why import why_now, why_then
from qdc.run.code import files
from qdc.run.edits import edits, named
from qdc.run.front import front
from qdc.run.log import log_of_build, read_log
from qdc.run.records import last_recipe
from qdc.run.references import refer
from qdc.store.store import Store


def main(arguments: list[str]) -> int:
    options = parser("why", __doc__ or "", sets=True)
    options.add_argument("stage")
    options.add_argument("what", metavar="WHAT")
    given = options.parse_args(arguments)
    recipe = Path(given.what) if given.what.endswith((".yaml", ".yml")) else None
    store = open_store(given.store, recipe)
    if recipe is None:
        return _then(store, given.stage, given.what, given.json)
    read = front(recipe, given.sets, store)
    made = plan(read.instances, store.record, store.latest, files(store))
    _known(given.stage, [stage.instance.name for stage in made.stages])
    changed = edits(last_recipe(store, recipe), read.recipe, read.origins)
    stages = [
        replace(stage, reasons=tuple(named(item, changed, read.recipe, read.origins) for item in stage.reasons))
        for stage in made.stages
    ]
    made = Plan(tuple(stages))
    stage = made[given.stage]
    record = store.record(stage.key) if stage.key and stage.state == "fresh" else None
    lines = why_now(made, given.stage, record, changed)
    if given.json:
        answer({"stage": stage.as_json(), "inputs": stage.inputs, "record": record, "log": None, "lines": lines})
    else:
        print("\n".join(lines))
    return 0


def _then(store: Store, stage: str, what: str, as_json: bool) -> int:
    log = read_log(store, what)
    if log is None:
        build = refer(what, store).build
        log = log_of_build(store, build["build"]) if build is not None else None
    if log is None:
        raise QdcError(
            "why.log", f"no log of `{what}` is in the store {store.root}", hint="`qdc show --logs` lists them"
        )
    _known(stage, log["stages"])
    lines = why_then(log, stage)
    if as_json:
        then: dict[str, Any] = {"stage": None, "inputs": {}, "record": None}
        answer({**then, "log": {"log": log["log"], "stage": log["stages"][stage]}, "lines": lines})
    else:
        print("\n".join(lines))
    return 0


def _known(stage: str, names: Iterable[str]) -> None:
    listed = list(names)
    if stage not in listed:
        raise QdcError("why.stage", f"there is no stage `{stage}`", hint=suggestion(stage, listed, "stages"))
