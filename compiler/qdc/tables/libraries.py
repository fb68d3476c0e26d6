"""The engine's compiled libraries that matter, and on which cards: libraries.json.

A library that no row names decides nothing. `need`: `always`; `experts` (models with a mixture of experts);
`optional` (compiled at first use where it is missing); `never` (other models' kernels). `cards`: lowest and highest
compute capability that uses it, None for all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from qdc.tables.cells import read
from qdc.tables.hardware import order


@dataclass(frozen=True)
class Library:
    """A row; `source` in words, `assumed`: not read in a package and not reported."""

    path: str
    need: Literal["always", "experts", "optional", "never"]
    cards: tuple[str, str] | None
    source: str
    assumed: bool = False

    def needed(self, sm: str, *, experts: bool) -> bool:
        """Whether the engine uses it on a card of that compute capability for such a model."""
        if self.need in ("never", "optional") or (self.need == "experts" and not experts):
            return False
        return self.cards is None or order(self.cards[0]) <= order(sm) <= order(self.cards[1])


def library(path: str) -> Library | None:
    """The row of a file of the image, None where none names it."""
    return next((row for row, pattern in _rows() if pattern.search(path)), None)


@cache
def _rows() -> list[tuple[Library, re.Pattern[str]]]:
    table: dict[str, Any] = read("libraries.json")
    rows = []
    for given in table["rows"]:
        cards = tuple(given["cards"]) if given["cards"] else None
        row = Library(**{**given, "cards": cards, "source": table["sources"][given["source"]]})
        rows.append((row, re.compile(rf"(?:^|/){row.path}$")))
    return rows
