"""`qdc why STAGE RECIPE`: why a stage is fresh, stale or waiting."""

from __future__ import annotations

from pathlib import Path

from qdc.cli.common import answer, open_store, parser
from qdc.core.errors import QdcError
from qdc.core.spelling import suggestion
from qdc.graph.plan import plan
from qdc.report.text import reason_text
from qdc.run.front import front


def main(arguments: list[str]) -> int:
    options = parser("why", __doc__ or "", sets=True)
    options.add_argument("stage")
    options.add_argument("recipe", type=Path)
    given = options.parse_args(arguments)
    store = open_store(given.store, given.recipe)
    read = front(given.recipe, given.sets, store)
    made = plan(read.instances, store.record, store.latest)
    names = [stage.instance.name for stage in made.stages]
    if given.stage not in names:
        raise QdcError(
            "why.stage", f"the recipe has no stage `{given.stage}`", hint=suggestion(given.stage, names, "stages")
        )
    stage = made[given.stage]
    record = store.record(stage.key) if stage.key and stage.state == "fresh" else None
    if given.json:
        answer({"stage": stage.as_json(), "inputs": stage.inputs, "record": record})
        return 0
    print(f"{given.stage} is {stage.state}")
    for reason in stage.reasons:
        print(f"  {reason_text(reason)}")
    if record is not None:
        print(f"  nothing that its key covers has changed since {record['finished']}")
        print(f"  key {stage.key}")
        print(f"  output {record['output']} ({record['determinism']}, {record['seconds']:.1f} s)")
        for role, digest in stage.inputs.items():
            print(f"  input {role}: {stage.instance.inputs[role]} {digest[:12]}")
    return 0
