"""Kernels that multiply with packed weights in vLLM, and the matrices that each accepts: kernels.json.

A cell that is null decides nothing: the kernel may accept the value. Rows of the table are what reports and runs
have shown, not all that an engine has. Knows no recipe and no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from qdc.tables.cells import Cell, read


class Matrix(NamedTuple):
    """A packed weight: `out` rows and `columns` inputs; `group_size` -1 is one group a row; `dtype`: of activations."""

    bits: int
    group_size: int
    symmetric: bool
    out: int
    columns: int
    dtype: str


@dataclass(frozen=True)
class Kernel:
    """`sm`: least and greatest compute capability, the latter None without a limit; `in_multiple`, `out_multiple`:
    what inputs and rows must be multiples of."""

    name: str
    platform: str
    sm: Cell[list[str | None] | None]
    dtypes: Cell[list[str] | None]
    bits: Cell[list[int] | None]
    group_sizes: Cell[list[int] | None]
    symmetric: Cell[bool | None]
    in_multiple: Cell[int | None]
    out_multiple: Cell[int | None]

    def refuses(self, matrix: Matrix) -> str | None:
        """Why the kernel cannot take the matrix; None where nothing of the row speaks against it."""
        if self.dtypes.value is not None and matrix.dtype not in self.dtypes.value:
            return f"takes {', '.join(self.dtypes.value)} only"
        if self.bits.value is not None and matrix.bits not in self.bits.value:
            return f"takes {_either(self.bits.value)} bits"
        if self.group_sizes.value is not None and matrix.group_size not in self.group_sizes.value:
            return f"takes groups of {_either(self.group_sizes.value)}"
        if self.symmetric.value is not None and matrix.symmetric != self.symmetric.value:
            return "takes symmetric codes only" if self.symmetric.value else "takes codes with zero points only"
        if self.in_multiple.value is not None and matrix.columns % self.in_multiple.value:
            return f"takes multiples of {self.in_multiple.value} inputs"
        if self.out_multiple.value is not None and matrix.out % self.out_multiple.value:
            return f"takes multiples of {self.out_multiple.value} outputs"
        return None


def rows(platform: str, sm: str) -> list[Kernel]:
    """The kernels of a platform that run on a card of that compute capability, `8.6`."""
    return [kernel for kernel in _table() if kernel.platform == platform and _runs(kernel.sm.value, sm)]


def _runs(limits: list[str | None] | None, sm: str) -> bool:
    if limits is None:
        return True
    least, greatest = (None if limit is None else _order(limit) for limit in limits)
    return (least is None or _order(sm) >= least) and (greatest is None or _order(sm) <= greatest)


def _order(sm: str) -> tuple[int, ...]:
    return tuple(int(part) for part in sm.split("."))


def _either(values: list[int]) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last


@cache
def _table() -> list[Kernel]:
    table: dict[str, Any] = read("kernels.json")
    return [
        Kernel(
            row["name"],
            row["platform"],
            **{
                column: Cell(given[0], table["sources"][given[1]])
                for column, given in row.items()
                if column not in ("name", "platform")
            },
        )
        for row in table["rows"]
    ]
