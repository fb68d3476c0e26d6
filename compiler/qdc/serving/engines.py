"""How one version of the engine on one platform is told things: engines.json, with a source for each entry.

An entry holds for a range of versions; a later one adds to an earlier one or overrides it. What an argument is called
where is data. What a version *can* is in `qdc.tables.engines`. Not in the image.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from qdc.core.errors import QdcError
from qdc.tables import engines as table
from qdc.tables.engines import order


def engine_row(engine: Mapping[str, Any]) -> dict[str, Any]:
    """All that holds for it, merged. Raises QdcError `serving.engine` if nothing is known of it.

    `engine`: the recipe's `serve.engine`, `{vllm: VERSION, platform: cpu | cuda, ...}`.
    """
    version, platform = str(engine.get("vllm")), str(engine.get("platform"))
    row: dict[str, Any] = {}
    for entry in _fitting(version, platform):
        row = _merged(row, entry["facts"])
    if not row or not table.known(version, platform):
        known = ", ".join(f"vllm {name} {kind}" for kind in ("cpu", "cuda") for name in table.rows(kind))
        raise QdcError(
            "serving.engine", f"no facts about the engine 'vllm {version} {platform}'", hint=f"known: {known}"
        )
    copy: dict[str, Any] = json.loads(json.dumps(row))
    return copy


def sources(engine: Mapping[str, Any]) -> list[str]:
    """Where the facts of `engine_row` come from."""
    return [_table()["sources"][entry["source"]] for entry in _fitting(str(engine["vllm"]), str(engine["platform"]))]


def required_patches(engine: Mapping[str, Any], drafts: bool) -> dict[str, str]:
    """Patch -> why the engine does not serve rightly without it. `drafts`: whether a drafter is served."""
    row = engine_row(engine)
    return {**row["required_patches"], **(row["required_with_drafter"] if drafts else {})}


def _fitting(version: str, platform: str) -> list[dict[str, Any]]:
    given = order(version)
    return [
        entry
        for entry in _table().get(platform, [])
        if given is not None and (order(entry["from"]) or ()) <= given <= (order(entry["to"]) or ())
    ]


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings merge, everything else is replaced."""
    made = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(made.get(key), dict)
        made[key] = _merged(made[key], value) if both else value
    return made


@cache
def _table() -> dict[str, Any]:
    rows: dict[str, Any] = json.loads((Path(__file__).parent / "engines.json").read_text(encoding="utf-8"))
    return rows
