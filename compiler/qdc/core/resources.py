"""Where the data folders beside the code are: templates, schema, recipes.

A checkout has them at its root; an installed package carries a copy under `qdc/_data`. This module does
not know what is in them.
"""

from __future__ import annotations

from pathlib import Path

from qdc.core.errors import COULD_NOT, QdcError

FOLDERS = ("templates", "schema", "recipes")


def resource(name: str) -> Path:
    """The file or folder `name` ("templates/Dockerfile.j2"), whose first part is one of `FOLDERS`.

    Raises QdcError `core.resource` when neither the package nor the checkout has it.
    """
    first, *rest = name.split("/")
    if first not in FOLDERS or ".." in rest:
        raise ValueError(f"not a resource name: {name!r}")
    package = Path(__file__).resolve().parents[1]
    for root in (package / "_data", package.parents[1]):
        candidate = root.joinpath(first, *rest)
        if candidate.exists():
            return candidate
    raise QdcError(
        "core.resource",
        f"this installation of qdc lacks its data file {name}",
        hint="install qdc again from its wheel, or run it from a whole checkout",
        exit_code=COULD_NOT,
    )
