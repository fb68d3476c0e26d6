"""What a user means by IMAGE: a build id, `@1`, a recipe path, or a place outside the store.

`oci:DIR`, `archive:FILE`, `docker:NAME`, `registry:REF` and `folder:DIR` (a model without an image) are places; the
others name a build in the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdc.core.errors import COULD_NOT, QdcError
from qdc.store.store import Store

PLACES = ("oci", "archive", "docker", "registry", "folder")


@dataclass(frozen=True)
class Reference:
    """`place` and `name` for an image outside the store; `build` for one inside."""

    place: str | None
    name: str
    build: dict[str, Any] | None = None


def refer(text: str, store: Store) -> Reference:
    """Raises QdcError `image.unknown` when `text` names nothing."""
    place, mark, name = text.partition(":")
    if mark and place in PLACES and name:
        return Reference(place, name)
    ids = store.builds()
    if text.startswith("@") and text[1:].isdecimal():
        number = int(text[1:])
        if not 1 <= number <= len(ids):
            raise QdcError(
                "image.unknown",
                f"`{text}`: the store {store.root} has {len(ids)} builds",
                hint="`qdc show` lists them" if ids else "`qdc build RECIPE` makes one",
            )
        return Reference(None, text, _record(store, ids[-number]))
    if text in ids:
        return Reference(None, text, _record(store, text))
    if text.endswith((".yaml", ".yml")):
        wanted = str(Path(text).resolve())
        for id in reversed(ids):
            build = store.build(id)
            if build is not None and build.get("recipe_file") == wanted:
                return Reference(None, text, build)
        raise QdcError(
            "image.unknown", f"no build of `{text}` is in the store {store.root}", hint=f"`qdc build {text}` makes one"
        )
    raise QdcError(
        "image.unknown",
        f"`{text}` names no image and no build",
        hint="give oci:DIR, archive:FILE, docker:NAME, registry:REF, folder:DIR, a build id, @1, or a recipe path",
    )


def _record(store: Store, id: str) -> dict[str, Any]:
    build = store.build(id)
    if build is None:
        raise QdcError(
            "build.damaged",
            f"the record of build {id} cannot be read",
            file=store.root / "builds" / f"{id}.json",
            exit_code=COULD_NOT,
            hint="remove the file and run `qdc build RECIPE` again: it writes a new one",
        )
    return build
