"""`qdc diff A B`: what differs between two recipes, builds or images, in domain words. Exit 1 when they differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qdc.cli.common import answer, open_store, parser
from qdc.core.errors import QdcError
from qdc.run.build import artifact_json
from qdc.run.references import refer
from qdc.store.store import Store


def main(arguments: list[str]) -> int:
    options = parser("diff", __doc__ or "")
    options.add_argument("a", help="a build id, @2, a recipe path, a manifest.json, archive:FILE or oci:DIR")
    options.add_argument("b")
    given = options.parse_args(arguments)
    near = next((Path(text) for text in (given.a, given.b) if text.endswith((".yaml", ".yml"))), None)
    store = open_store(given.store, near)
    a, b = _value(given.a, store, given.b), _value(given.b, store, given.a)
    if a[0] != b[0]:
        raise QdcError(
            "diff.kinds",
            f"`{given.a}` is a {a[0]} and `{given.b}` is a {b[0]}",
            hint="give two recipes, or two builds or images",
        )
    from qdc.manifest.diff import diff

    changes = diff(a[1], b[1])
    same = not any(change["from"] != change["to"] for change in changes)
    if given.json:
        answer({"same": same, "changes": changes})
    else:
        for change in changes:
            print(change["text"])
        if same:
            print("no difference")
    return 0 if same else 1


def _value(text: str, store: Store, other: str) -> tuple[str, dict[str, Any]]:
    """(kind, document): manifests for images and builds; resolved recipes when both are recipe files."""
    recipe_files = (".yaml", ".yml")
    if text.endswith(recipe_files) and other.endswith(recipe_files):
        from qdc.recipe.load import load

        return "recipe", load(Path(text)).data
    if text.endswith(".json") and Path(text).is_file():
        try:
            return "manifest", json.loads(Path(text).read_bytes())
        except ValueError:
            raise QdcError("diff.json", "this is not JSON", file=text) from None
    reference = refer(text, store)
    if reference.build is not None:
        return "manifest", artifact_json(store, reference.build["image"]["artifact"], "manifest.json")
    from qdc.audit.images import open_image, read_manifest

    with open_image(str(reference.place), reference.name) as reader:
        return "manifest", read_manifest(reader)
