"""`extends: other.yaml`: a recipe as changes to another one beside it.

Mappings merge, lists and values replace, null deletes. Every value keeps the file and place where it was written.
This module does not know which fields a recipe has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qdc.recipe.diagnostics import RecipeInvalid
from qdc.recipe.reading import Document, Path_, read_document

LIMIT_FILES = 16


def read_extended(path: Path) -> tuple[Document, dict[str, str]]:
    """The recipe at `path` merged over what it extends, and file -> SHA-256 of every file read.

    Faults of all files are in the document. Raises RecipeInvalid where one cannot be read at all.
    """
    chain = [read_document(path)]
    places = [path]
    while (found := _next(chain[-1], places)) is not None:
        places.append(found)
        chain.append(_read(chain[-1], found))
    merged = chain[-1]
    for document in reversed(chain[:-1]):
        merged = _over(document, merged)
    merged.data.pop("extends", None)
    return merged, {str(place.resolve()): document.sha256 for place, document in zip(places, chain, strict=True)}


def _next(document: Document, places: list[Path]) -> Path | None:
    """The file that `document` extends; a fault is added to the document where that is no file beside it."""
    if "extends" not in document.data:
        return None
    name, problem = document.data["extends"], None
    if not isinstance(name, str) or not name or "/" in name or "\\" in name:
        problem = ("`extends` names one recipe beside this one", "write the name of a file in the same folder")
    elif len(places) >= LIMIT_FILES:
        problem = (f"more than {LIMIT_FILES} recipes extend one another", "merge some of them")
    elif (places[-1].parent / name).resolve() in [place.resolve() for place in places]:
        problem = (f"`{name}` extends itself in a circle", "remove one `extends` of the circle")
    if problem is None:
        return places[-1].parent / str(name)
    document.faults.append(document.diagnose("YML08", "error", ("extends",), *problem))
    return None


def _read(document: Document, place: Path) -> Document:
    try:
        return read_document(place)
    except RecipeInvalid as invalid:
        if place.is_file():
            raise
        message = f"cannot read `{place.name}`, which this recipe extends: no such file"
        hint = "write the name of a recipe in the same folder"
        fault = document.diagnose("YML08", "error", ("extends",), message, hint)
        raise RecipeInvalid([*document.faults, fault]) from invalid


def _over(top: Document, base: Document) -> Document:
    """`top` with what it lacks taken from `base`. Changes `top`."""
    top.faults = [*top.faults, *base.faults]
    _merge(top, base, (), top.data, base.data)
    return top


def _merge(top: Document, base: Document, path: Path_, into: dict[str, Any], source: dict[str, Any]) -> None:
    for key, value in source.items():
        here = (*path, key)
        if here == ("extends",):
            continue
        if key not in into:
            into[key] = value
            _adopt(top, base, here)
        elif isinstance(into[key], dict) and isinstance(value, dict):
            if here in base.partial:
                top.partial.add(here)
            _merge(top, base, here, into[key], value)
    unread = path in base.partial or () in base.partial
    nulls = [key for key, value in into.items() if value is None and (*path, key) in top.values]
    for key in [key for key in nulls if key in source or unread]:
        if (*path, key) not in top.sets:
            del into[key]


def _adopt(top: Document, base: Document, path: Path_) -> None:
    """Take over what is known of `path` and below from `base`."""
    below = len(path)
    for mine, its in ((top.keys, base.keys), (top.values, base.values)):
        mine.update({place: span for place, span in its.items() if place[:below] == path})
    for mine_set, its_set in ((top.bad, base.bad), (top.partial, base.partial)):
        mine_set.update(place for place in its_set if place[:below] == path)
    inner = {place: document for place, document in base.sets.items() if place[:below] == path}
    top.sets.update(inner if path in inner else {**inner, path: base.source(path)})
