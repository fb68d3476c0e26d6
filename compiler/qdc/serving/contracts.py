"""What those who start an image ask of it: contracts.json, with a source for each field.

serve.json, the OCI config and the gate follow it. Knows no engine and no image. Standard library and core only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from qdc.core.errors import QdcError


@dataclass(frozen=True)
class SizeLimit:
    """`bytes`: the largest that is taken; `of`: what is weighed, as in a recipe's `deploy.size_limit`."""

    bytes: float
    of: str


@dataclass(frozen=True)
class Contract:
    """The fields are explained in contracts.json; `sources`: field -> who says so."""

    name: str
    argument: str | None
    port: int
    ping: str
    invocations: str
    routes: tuple[str, ...]
    ready_s: float | None
    answer_s: float | None
    size_limit: SizeLimit | None
    archive: str | None
    sources: dict[str, str]

    @property
    def arguments(self) -> list[str]:
        """What is typed after the image's name."""
        return [] if self.argument is None else [self.argument]

    def served(self) -> dict[str, Any]:
        """What the image itself must know of it: `contract` of serve.json."""
        return {
            "name": self.name,
            "argument": self.argument,
            "ping": self.ping,
            "invocations": self.invocations,
            "routes": list(self.routes),
        }


def names() -> list[str]:
    """The names of all contracts, sorted."""
    return sorted(_table()["contracts"])


def contract(name: str) -> Contract:
    """The contract of that name. Raises QdcError `serving.contract` if there is none."""
    if name not in _table()["contracts"]:
        raise QdcError("serving.contract", f"there is no contract {name!r}", hint="known: " + ", ".join(names()))
    row = _table()["contracts"][name]
    values = {field.name: row[field.name]["value"] for field in fields(Contract) if field.name in row}
    limit = values.pop("size_limit")
    sources = {field: _table()["sources"][cell["source"]] for field, cell in row.items()}
    return Contract(
        **values | {"routes": tuple(values["routes"])},
        name=name,
        size_limit=None if limit is None else SizeLimit(**limit),
        sources=sources,
    )


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads((Path(__file__).parent / "contracts.json").read_text(encoding="utf-8"))
    return table
