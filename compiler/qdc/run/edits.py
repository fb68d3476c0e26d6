"""What changed in a recipe since it was last built, and which of it a stage's reason speaks of. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qdc.graph.plan import differences

Json = dict[str, Any]


def edits(before: Mapping[str, Any] | None, now: Mapping[str, Any], origins: Mapping[str, str]) -> list[Json]:
    """[{path, was, now, where}] of every value that differs; `where`: file and line of the present one, or None."""
    if before is None:
        return []
    return [
        {"path": path, "was": was, "now": value, "where": _where(path, origins)}
        for path, was, value in differences(dict(before), dict(now))
    ]


def named(reason: Mapping[str, Any], found: list[Json], recipe: Mapping[str, Any], origins: Mapping[str, str]) -> Json:
    """`reason` with `path` and `where` of the recipe's value that it speaks of, where that can be told.

    A stage knows its parameters by its own names; the recipe's value has the same last names and the same value.
    """
    if reason["kind"] != "parameter":
        return dict(reason)
    tail = str(reason["what"]).split(".")
    close = [edit for edit in found if edit["now"] == reason["now"] and edit["was"] == reason["was"]]
    paths = [edit["path"] for edit in close] or [path for path, value in _leaves(recipe) if value == reason["now"]]
    best = max(paths, key=lambda path: (_shared(path.split("."), tail), -len(path)), default=None)
    if best is None or not _shared(best.split("."), tail):
        return dict(reason)
    return {**reason, "path": best, "where": _where(best, origins)}


def _shared(path: list[str], tail: list[str]) -> int:
    """How many last names two paths have in common."""
    count = 0
    while count < min(len(path), len(tail)) and path[-1 - count] == tail[-1 - count]:
        count += 1
    return count


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, f"{path}.{key}" if path else key)]
    if isinstance(value, list):
        inside = [leaf for index, inner in enumerate(value) for leaf in _leaves(inner, f"{path}.{index}")]
        return [(path, value), *inside]
    return [(path, value)]


def _where(path: str, origins: Mapping[str, str]) -> str | None:
    """Where the value, or the nearest mapping around it, was written."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        if (found := origins.get(".".join(parts[:length]))) is not None:
            return found
    return None
