"""A cell of a table of facts: a value and where it comes from. Knows no table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

Value = TypeVar("Value", covariant=True)


@dataclass(frozen=True)
class Cell(Generic[Value]):
    """`value`: None where the thing has none; `source`: in words or as a URL; `assumed`: not measured, not read."""

    value: Value
    source: str
    assumed: bool = False


def read(name: str) -> Any:
    """The JSON file `name` of this folder."""
    return json.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))
