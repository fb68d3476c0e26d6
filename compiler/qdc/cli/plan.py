"""`qdc plan RECIPE`: what a build would run and why, and what it will cost and give. Exit 1 when anything is stale."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import TYPE_CHECKING

from qdc.cli.common import answer, note, open_store, parser

if TYPE_CHECKING:
    from qdc.graph.plan import Plan
    from qdc.measure.predict import Predictions
    from qdc.run.front import Front
    from qdc.store.store import Store


def main(arguments: list[str]) -> int:
    options = parser("plan", __doc__ or "", sets=True)
    options.add_argument("recipe", type=Path)
    given = options.parse_args(arguments)
    gc.disable()  # Importing makes many objects and no garbage.
    from qdc.graph.plan import plan
    from qdc.report.plan import prediction_lines, stage_lines
    from qdc.run.front import front

    store = open_store(given.store, given.recipe)
    read = front(given.recipe, given.sets, store)
    made = plan(read.instances, store.record, store.latest)
    image = made["image"]
    facts = json.loads(store.read(image.output, "image.json")) if image.output else {}
    predicted = _predictions(read, made, store)
    gc.enable()
    if given.json:
        answer(
            {
                "recipe": read.recipe["name"],
                "stages": [stage.as_json() for stage in made.stages],
                "image": {"name": facts["name"], "id": facts["id"]} if facts else {},
                "predictions": predicted.as_json(),
            }
        )
    else:
        for warning in [*read.unlocked, *read.warnings]:
            note(warning)
        print("\n".join(stage_lines(made.stages)))
        if facts:
            print(f"image {facts['name']}")
        print("\n".join(["", *prediction_lines(predicted)]))
    return 0 if made.fresh else 1


def _predictions(read: Front, made: Plan, store: Store) -> Predictions:
    from qdc.formats.checkpoint import ModelFacts
    from qdc.measure.past import Past, past
    from qdc.measure.predict import predict
    from qdc.run.settings import training_bytes

    known = Past()
    if store.builds():
        from qdc.run.build import hardware

        known = past(store, read.recipe, hardware())
    return predict(
        read.recipe,
        {place: ModelFacts.from_json(value) for place, value in read.facts.items()},
        known,
        fresh=set(made.names("fresh")),
        stale=[stage.instance.name for stage in made.stages if stage.state != "fresh"],
        missing=read.missing,
        training_bytes=training_bytes(),
        base_bytes=read.base_bytes,
    )
