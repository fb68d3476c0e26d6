"""What earlier builds in the store say that a plan can use: sizes of layers, acceptance length, seconds of stages.

Everything is taken from build records and the image descriptions that they name; a record that cannot be read is
as if it were not there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from qdc.core.errors import QdcError
from qdc.store.store import Store

Json = dict[str, Any]
LOOKED_AT = 8
"""Builds that are looked at, newest first."""


@dataclass(frozen=True)
class Past:
    """`layers`: role of layers -> their bytes in `layers_of`, a build on the same base; `acceptance`: tokens a step in
    `acceptance_of`, with the same K; `acceptance_exact`: that build had this target and drafter; `timed`: stage ->
    (seconds on this machine, recipe of that build, build)."""

    layers: dict[str, int] = field(default_factory=dict)
    layers_of: str = ""
    acceptance: float | None = None
    acceptance_of: str = ""
    acceptance_exact: bool = False
    timed: dict[str, tuple[float, Json, str]] = field(default_factory=dict)


def past(store: Store, recipe: Json, hardware: Json) -> Past:
    """The newest that the store has of each. `hardware`: this machine as build records describe it."""
    layers: dict[str, int] = {}
    layers_of, acceptance, acceptance_of, exact = "", None, "", False
    timed: dict[str, tuple[float, Json, str]] = {}
    wanted = _given(_shapes(recipe))
    for build in _builds(store):
        of = build["recipe"]
        if not layers and _same(
            of, recipe, ("image", "base"), ("serve", "engine", "vllm"), ("serve", "engine", "platform")
        ):
            layers, layers_of = _layers(store, build), build["build"]
        same_k = build["recipe_name"] == recipe["name"] and _same(of, recipe, ("serve", "k"))
        if acceptance is None and same_k and (found := _acceptance(build, recipe["serve"]["k"])) is not None:
            acceptance, acceptance_of = found, build["build"]
            exact = _same(of, recipe, ("target",), ("drafter",), ("data",))
        if _given(_shapes(of)) == wanted:
            for stage in build["stages"]:
                if stage.get("hardware") == hardware and stage.get("built_seconds") is not None:
                    timed.setdefault(stage["name"], (float(stage["built_seconds"]), of, build["build"]))
    return Past(layers, layers_of, acceptance, acceptance_of, exact, timed)


def _builds(store: Store) -> Iterator[Json]:
    needed = {"recipe", "recipe_name", "stages", "build", "image", "measurements"}
    for id in reversed(store.builds()[-LOOKED_AT:]):
        build = store.build(id)
        if build is not None and needed <= set(build):
            yield build


def _same(one: Json, other: Json, *places: tuple[str, ...]) -> bool:
    return all(_given(_at(one, place)) == _given(_at(other, place)) for place in places)


def _given(value: Any) -> Any:
    """Without what is null, false or empty: an earlier schema may not have had the field."""
    if isinstance(value, dict):
        kept = {key: _given(inner) for key, inner in value.items()}
        return {key: inner for key, inner in kept.items() if inner not in (None, False, [], {})}
    return [_given(inner) for inner in value] if isinstance(value, list) else value


def _at(value: Any, place: tuple[str, ...]) -> Any:
    for part in place:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _shapes(recipe: Json) -> list[Any]:
    """What decides how long a step of a stage takes, besides its own fields: the models."""
    base = _at(recipe, ("target", "base"))
    scratch = _at(base, ("scratch",))
    model = [scratch.get("architecture"), scratch.get("tokenizer")] if isinstance(scratch, dict) else base
    return [model, _at(recipe, ("drafter", "architecture")), _at(recipe, ("drafter", "checkpoint"))]


def _layers(store: Store, build: Json) -> dict[str, int]:
    try:
        value = json.loads(store.read(build["image"]["artifact"], "image.json"))
        sizes: dict[str, int] = {}
        for layer in value["layers"]:
            sizes[layer["role"]] = sizes.get(layer["role"], 0) + int(layer["size"])
        return sizes
    except (QdcError, ValueError, KeyError, TypeError):
        return {}


def _acceptance(build: Json, k: int | None) -> float | None:
    """What the engine counted, else what replay of the served drafter gave, else of the last drafter replayed."""
    rows = [row for row in build["measurements"] if row.get("metric") == "acceptance-length"]
    rows = [row for row in rows if row.get("what") == f"drafter, K {k}"]
    for wanted in ("engine", "as served", ""):
        for row in reversed(rows):
            if wanted in str(row.get("subject")):
                return float(row["value"])
    return None
