"""The cards that a recipe may name, with what is known of each: hardware.json.

Memory is nominal (10^9 bytes as sold). Print the word "assumed" beside every figure made from an assumed cell.
Knows no engine: whether the two fit is for the rules to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from qdc.tables.cells import Cell, read


@dataclass(frozen=True)
class Card:
    """`sm`: compute capability, `8.6`; `memory_gb`: GB; `bandwidth_gbs`: GB/s of the memory; `bf16_tflops`: dense
    BF16 TFLOP/s. A value is None where the row has none (a CPU)."""

    name: str
    sm: Cell[str | None]
    memory_gb: Cell[float | None]
    bandwidth_gbs: Cell[float | None]
    bf16_tflops: Cell[float | None]


def names() -> list[str]:
    """The names of all rows, in the table's order."""
    return list(_table()["rows"])


def row(name: str) -> Card | None:
    """The row of that name, None if there is none."""
    cells = _table()["rows"].get(name)
    return None if cells is None else Card(name, **{column: _cell(*given) for column, given in cells.items()})


def order(sm: str) -> tuple[int, ...]:
    """A key that sorts compute capabilities: `8.6` before `10.0`."""
    return tuple(int(part) for part in sm.split("."))


def _cell(value: Any, source: str, mark: str = "") -> Cell[Any]:
    return Cell(value, _table()["sources"][source], mark == "assumed")


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = read("hardware.json")
    return table
