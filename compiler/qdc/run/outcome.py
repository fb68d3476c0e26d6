"""How a build begins and ends around its stages: what cannot be built is refused; a record and a log are left.

The same for a build of one recipe and for each member of a sweep.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdc.core.errors import COULD_NOT, QdcError
from qdc.run.build import Ran, artifact_json, save_build
from qdc.run.front import Front, require_lock
from qdc.run.log import Decisions
from qdc.run.records import build_document, last_recipe, measurements
from qdc.store.store import Store


@dataclass(frozen=True)
class Outcome:
    """`build`: its id; `image`: {name, id, artifact}; `rows`, `tests`: what its stages measured; `bytes`: of all layers
    of the image."""

    build: str
    image: dict[str, Any]
    rows: list[dict[str, Any]]
    tests: list[dict[str, Any]]
    bytes: int


def require_buildable(read: Front, recipe: Path, sets: list[str]) -> None:
    """Raises QdcError where no stage makes something that the recipe asks for, or its lock does not fit."""
    if read.missing:
        listed = "".join(f"\n  {path}: {what}" for path, what in read.missing)
        raise QdcError(
            "build.unsupported",
            "this recipe can be checked and planned, but its image cannot be built yet; no stage makes:" + listed,
            exit_code=COULD_NOT,
            hint="`qdc plan` shows what it would be",
        )
    require_lock(read, recipe, sets)


def keep_outcome(
    store: Store, recipe: Path, read: Front, stages: list[Ran], started: float, *, among: int = 1
) -> tuple[Outcome, bool]:
    """Keep the record of a build whose stages are all fresh; whether it is a new one.

    It is not where nothing ran and one of the latest `among` records says the same.
    """
    output = next(stage.output for stage in stages if stage.name == "image")
    facts = artifact_json(store, output, "image.json")
    image = {"name": facts["name"], "id": facts["id"], "artifact": output}
    rows, tests = measurements(store, stages)
    id = same_build(store, recipe, read.recipe, image, stages, among)
    made = id is None
    if id is None:
        id = save_build(store, build_document(store, read, recipe, stages, image, started))
    size = sum(int(layer["size"]) for layer in facts["layers"])
    return Outcome(id, image, rows, tests, size), made


def same_build(
    store: Store, file: Path, recipe: dict[str, Any], image: dict[str, Any], stages: list[Ran], among: int = 1
) -> str | None:
    """The latest build (or one of several), if nothing ran since and it is of this recipe with these outputs: then it
    is this build."""
    if any(stage.ran for stage in stages):
        return None
    outputs = {stage.name: stage.output for stage in stages}
    for id in reversed(store.builds()[-among:]):
        last = store.build(id)
        if (
            last is not None
            and (last["recipe_file"], last["recipe"], last["image"]) == (str(file.resolve()), recipe, image)
            and {stage["name"]: stage["output"] for stage in last["stages"]} == outputs
        ):
            return id
    return None


def keep_log(
    store: Store,
    recipe: Path,
    read: Front,
    decisions: Decisions | None,
    started: float,
    id: str | None,
    error: BaseException | None = None,
) -> None:
    """Keep what was decided; a log that cannot be written is no reason to fail."""
    if decisions is None or not decisions.acted:
        return
    from qdc.run.edits import edits
    from qdc.run.log import write_log

    result = "done" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    outcome = {"result": result, "build": id, "error": str(error)[:500] if result == "failed" else None}
    changed = edits(last_recipe(store, recipe, id), read.recipe, read.origins)
    with contextlib.suppress(OSError, QdcError):
        write_log(store, started, str(recipe.resolve()), read.recipe["name"], changed, decisions, outcome)
