"""What a build leaves behind: its record, and the measurements that its stages made."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from qdc.manifest.record import build_record
from qdc.run.build import Ran, artifact_json
from qdc.run.front import Front
from qdc.run.machine import hardware
from qdc.store.store import Store

ACCOUNTS = {"prompts": "summary.json", "corpus": "summary.json", "pack": "pack.json", "calibrate": "summary.json"}


def measurements(store: Store, stages: list[Ran]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows, tests) of every evaluation among `stages`."""
    rows: list[dict[str, Any]] = []
    tests: list[dict[str, Any]] = []
    for stage in stages:
        if stage.name.startswith("evaluate:"):
            value = artifact_json(store, stage.output, "evaluation.json")
            rows += value["rows"]
            tests += value.get("tests", [])
    return rows, tests


def build_document(
    store: Store, read: Front, recipe: Path, stages: list[Ran], image: dict[str, Any], started: float
) -> dict[str, Any]:
    """The build record (architecture, "Image, content manifest, build record") without its id."""
    rows, tests = measurements(store, stages)
    by_name = {instance.name: instance for instance in read.instances}
    digests = {stage.name: stage.output for stage in stages}
    details = []
    for stage in stages:
        instance = by_name[stage.name]
        inputs = {
            role: source[5:] if source.startswith("tree:") else digests[source]
            for role, source in instance.inputs.items()
        }
        key = instance.key(inputs)
        record = store.record(key) or {}
        details.append(
            {
                **stage.as_json(),
                "key": key,
                "inputs": inputs,
                "code": instance.code,
                "packages": instance.packages,
                "determinism": record.get("determinism", instance.determinism),
                "kept": record.get("kept"),
                "imported": record.get("imported"),
                "seed": _seed(instance.params),
                "built": record.get("finished"),
                "built_seconds": record.get("seconds"),
                "threads": record.get("threads"),
                "hardware": record.get("hardware"),
                "rows": _rows(store, instance.kind, stage.output),
            }
        )
    return build_record(
        recipe_name=read.recipe["name"],
        recipe_file=str(recipe.resolve()),
        recipe_digest=read.digest,
        recipe=read.recipe,
        origins=read.origins,
        accepted=read.recipe["accept"],
        stages=details,
        image=image,
        measurements=rows,
        tests=tests,
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        seconds=round(time.time() - started, 3),
        hardware=hardware(),
        python=sys.version.split()[0],
    )


def last_recipe(store: Store, recipe: Path, but: str | None = None) -> dict[str, Any] | None:
    """The resolved recipe of the last build of this recipe file, `but` the build with this id."""
    wanted = str(recipe.resolve())
    for id in reversed(store.builds()):
        build = store.build(id) if id != but else None
        if build is not None and build.get("recipe_file") == wanted:
            return dict(build["recipe"])
    return None


def _rows(store: Store, kind: str, output: str) -> Any:
    """Row accounting of a data stage, as it wrote it."""
    return artifact_json(store, output, ACCOUNTS[kind]) if kind in ACCOUNTS else None


def _seed(params: dict[str, Any]) -> Any:
    """The first `seed` among a stage's parameters."""
    front: list[Any] = [params]
    while front:
        value = front.pop(0)
        if isinstance(value, dict):
            if "seed" in value:
                return value["seed"]
            front += list(value.values())
    return None


def add_measurements(store: Store, id: str, rows: list[dict[str, Any]]) -> None:
    """Add a gate's rows to a build record; rows of an earlier gate on the same image are replaced."""
    names = {(row["what"], row["subject"], row["metric"]) for row in rows}
    with store.lock("builds"):
        build = store.build(id)
        if build is not None:
            kept = [row for row in build["measurements"] if (row["what"], row["subject"], row["metric"]) not in names]
            store.add_build({**build, "measurements": kept + rows})
