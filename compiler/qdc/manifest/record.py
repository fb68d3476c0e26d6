"""The build record: how an image came to be. It stays outside the image and names it by its ID.

A pure function that shapes what a build knows; it reads no clock, no machine and no store. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from qdc.core import canonical
from qdc.core.errors import QdcError

SCHEMA = 1
STAGE_FIELDS = frozenset({"name", "ran", "seconds", "output", "key", "inputs", "code", "packages", "determinism"})


def build_record(
    *,
    recipe_name: str,
    recipe_file: str,
    recipe_digest: str,
    recipe: Mapping[str, Any],
    origins: Mapping[str, Any],
    accepted: Sequence[Mapping[str, Any]],
    stages: Sequence[Mapping[str, Any]],
    image: Mapping[str, Any],
    measurements: Sequence[Mapping[str, Any]] = (),
    tests: Sequence[Mapping[str, Any]] = (),
    started: str,
    seconds: float,
    hardware: Mapping[str, Any],
    python: str,
    build: str | None = None,
) -> dict[str, Any]:
    """The build record as a JSON value.

    `recipe`: resolved; `recipe_digest`: SHA-256 (hex) of the recipe file; `origins`: recipe path -> where its
    value came from. `stages`: rows in order, each with at least `name`, `ran` (False: served from the store),
    `seconds`, `output` (tree digest), `key`, `inputs` (role -> tree digest), `code` (digest), `packages`
    (name -> version), `determinism`; also `seed`, `threads`, `hardware`, `rows` (row accounting).
    `image`: `{name, id, ..}`; every measurement is bound to that `id`. `started`: UTC, ISO 8601; `seconds`:
    wall time. Raises QdcError `record.*` when a stage row lacks a field or a measurement names another image.
    """
    for row in stages:
        missing = sorted(STAGE_FIELDS.difference(row))
        if missing:
            raise QdcError("record.stage", f"stage {row.get('name')!r} lacks {', '.join(missing)}", exit_code=4)
    bound = [{"image": image.get("id"), **row} for row in measurements]
    stray = [row for row in bound if row["image"] != image.get("id")]
    if stray:
        raise QdcError("record.measurement", f"a measurement names the image {stray[0]['image']}", exit_code=4)
    document = {
        "schema": SCHEMA,
        "recipe_name": recipe_name,
        "recipe_file": recipe_file,
        "recipe_digest": recipe_digest,
        "recipe": dict(recipe),
        "origins": dict(origins),
        "accepted": [dict(rule) for rule in accepted],
        "stages": [dict(row) for row in stages],
        "image": dict(image),
        "measurements": bound,
        "tests": [dict(row) for row in tests],
        "started": started,
        "seconds": seconds,
        "hardware": dict(hardware),
        "python": python,
        **({"build": build} if build is not None else {}),
    }
    try:
        result: dict[str, Any] = json.loads(canonical.dumps(document))
    except (TypeError, ValueError) as error:
        raise QdcError("record.not-json", f"not a JSON value: {error}", exit_code=4) from error
    return result
