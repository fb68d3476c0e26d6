"""A predicted number with its unit, where it comes from, and whether it rests on an assumption."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Number = int | float


class Lacking(Exception):
    """A prediction that cannot be made. `needs`: recipe paths of checkpoints whose headers are not at hand;
    `why`: another reason, in words."""

    def __init__(self, needs: Iterable[str] = (), why: str = "") -> None:
        super().__init__(why)
        self.needs, self.why = tuple(needs), why


@dataclass(frozen=True)
class Figure:
    """`assumed`: a part of it was neither measured nor computed from what is known; `source`: which data it is from."""

    value: Number
    unit: str
    assumed: bool
    source: str

    def as_json(self) -> dict[str, Any]:
        return {"value": self.value, "unit": self.unit, "assumed": self.assumed, "source": self.source}


@dataclass(frozen=True)
class Term:
    """A named part of a sum."""

    what: str
    figure: Figure

    def as_json(self) -> dict[str, Any]:
        return {"what": self.what, **self.figure.as_json()}


def total(terms: Iterable[Term]) -> Figure:
    """The sum of terms of one unit; assumed where one of them is. Its source names the assumed ones."""
    listed = list(terms)
    figures = [term.figure for term in listed]
    guessed = [term.what for term in listed if term.figure.assumed]
    source = f"sum; assumed: {', '.join(guessed)}" if guessed else "sum"
    return Figure(sum(item.value for item in figures), figures[0].unit, bool(guessed), source)
