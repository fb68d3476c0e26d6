"""vLLM by version and platform, with a source for each fact: engines.json.

A column is a feature (true or false), a word, a number or a list. A cell that is not established is null there and
None here: it decides nothing. Between two versions of the table the stricter of the two readings holds; outside of
them nothing is known. Knows no recipe, and no engine's arguments: those are in `qdc.serving`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from qdc.tables.cells import Cell, read

_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.?(a|b|rc|dev|post)(\d+))?(?:\+[\w.]+)?")
_STAGES = {"dev": -4, "a": -3, "b": -2, "rc": -1, None: 0, "post": 1}


def order(version: str) -> tuple[int, ...] | None:
    """A key that sorts versions (`0.29.1rc1` before `0.29.1`); None for text that is no version."""
    found = _VERSION.fullmatch(version)
    if found is None:
        return None
    major, minor, patch, stage, number = found.groups()
    return int(major), int(minor), int(patch or 0), _STAGES[stage], int(number or 0)


def before(version: str, bound: str) -> bool:
    """Whether `version` is older than `bound`; false where it cannot be told."""
    one, other = order(version), order(bound)
    return one is not None and other is not None and one < other


def rows(platform: str) -> list[str]:
    """The versions of a platform that the table has, oldest first."""
    return list(_table()["rows"].get(platform, []))


def known(version: str, platform: str) -> bool:
    """Whether the table has that version on that platform."""
    return order(version) in {order(row) for row in rows(platform)}


def columns() -> dict[str, str]:
    """Column -> what it means."""
    return {name: column["meaning"] for name, column in _table()["columns"].items()}


def cell(version: str, platform: str, column: str) -> Cell[Any] | None:
    """The fact, or None where none is established. Raises KeyError where there is no such column."""
    facts = _table()["columns"][column]
    given = order(version)
    inspected = sorted(((_key(row), row) for row in facts.get(platform, {})), reverse=True)
    below = next((row for key, row in inspected if given is not None and key <= given), None)
    above = next((row for key, row in reversed(inspected) if given is not None and key >= given), None)
    if below is None or above is None:
        return None
    lower, upper = _cell(facts, platform, below), _cell(facts, platform, above)
    if below == above or lower is None or upper is None:
        return lower if below == above else None
    value = _stricter(lower.value, upper.value, facts.get("strict_first"))
    between = f"between {below} and {above}, the stricter reading; {below}: {lower.source}; {above}: {upper.source}"
    return None if value is None else Cell(value, between)


def value(version: str, platform: str, column: str) -> Any:
    """The value of `cell`, None where none is established."""
    found = cell(version, platform, column)
    return found.value if found is not None else None


def first(platform: str, column: str, wanted: Any = True) -> str | None:
    """The oldest version of the table on which the column has the value `wanted`, None if none has."""
    facts = _table()["columns"][column].get(platform, {})
    return min((row for row in facts if value(row, platform, column) == wanted), key=_key, default=None)


def last(platform: str, column: str, wanted: Any = True) -> str | None:
    """The newest version of the table on which the column has the value `wanted`, None if none has."""
    facts = _table()["columns"][column].get(platform, {})
    return max((row for row in facts if value(row, platform, column) == wanted), key=_key, default=None)


@dataclass(frozen=True)
class Architecture:
    """What an engine takes a drafter's `architectures` name for. `column`: true on versions that have the class;
    `families`: the `model_type`s that the class is for, None for any; `runner`: the only model runner, None for any."""

    name: str
    column: str
    families: list[str] | None
    runner: str | None
    source: str


def architecture(name: str) -> Architecture | None:
    """The class of that name, None where nothing is known of it."""
    given = _table()["architectures"].get(name)
    return None if given is None else Architecture(name, **given | {"source": _source(given["source"])})


def architecture_of(column: str, family: str) -> str | None:
    """The name whose class serves drafters of this column and `model_type`, None where none is known."""
    rows = _table()["architectures"].items()
    return next((name for name, row in rows if row["column"] == column and family in (row["families"] or [])), None)


def _cell(facts: dict[str, Any], platform: str, row: str) -> Cell[Any] | None:
    given = facts[platform][row]
    if given is None:
        return None
    value, source = (given["value"], given["source"]) if isinstance(given, dict) else (given, facts["source"])
    return Cell(value, _source(source))


def _source(word: str) -> str:
    return str(_table()["sources"].get(word, word))


def _stricter(lower: Any, upper: Any, strict_first: list[Any] | None) -> Any:
    """Of two readings the one that promises less; None where neither does."""
    if lower == upper:
        return lower
    if strict_first:
        return min(lower, upper, key=strict_first.index)
    if isinstance(lower, bool) and isinstance(upper, bool):
        return False
    if isinstance(lower, list) and isinstance(upper, list):
        return [item for item in lower if item in upper]
    return None


def _key(version: str) -> tuple[int, ...]:
    key = order(version)
    assert key is not None, version
    return key


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = read("engines.json")
    return table
