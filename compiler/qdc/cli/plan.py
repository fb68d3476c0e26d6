"""`qdc plan RECIPE`: what a build would run, and why. Exit 1 when anything is stale."""

from __future__ import annotations

from pathlib import Path

from qdc.cli.common import answer, note, open_store, parser
from qdc.graph.plan import plan
from qdc.report.text import reason_text
from qdc.run.build import artifact_json
from qdc.run.front import front


def main(arguments: list[str]) -> int:
    options = parser("plan", __doc__ or "", sets=True)
    options.add_argument("recipe", type=Path)
    given = options.parse_args(arguments)
    store = open_store(given.store, given.recipe)
    read = front(given.recipe, given.sets, store)
    made = plan(read.instances, store.record, store.latest)
    image = made["image"]
    facts = artifact_json(store, image.output, "image.json") if image.output else {}
    if given.json:
        answer(
            {
                "recipe": read.recipe["name"],
                "stages": [stage.as_json() for stage in made.stages],
                "image": {"name": facts["name"], "id": facts["id"]} if facts else {},
                "predictions": {},
            }
        )
    else:
        for warning in [*read.unlocked, *read.warnings]:
            note(warning)
        width = max(len(stage.instance.name) for stage in made.stages)
        for stage in made.stages:
            why = "; ".join(reason_text(reason) for reason in stage.reasons[:2])
            print(f"{stage.instance.name.ljust(width)}  {stage.state.ljust(7)}  {why}".rstrip())
        if facts:
            print(f"image {facts['name']}")
    return 0 if made.fresh else 1
