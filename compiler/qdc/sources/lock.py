"""The lock: for every source that a recipe names, the digests of its files and what its headers say.

`<recipe>.lock` lies beside the recipe and is committed with it. It holds no time, host, user or token, so that two
people who lock the same recipe get the same bytes. This module reads and writes it, and says how it fits a recipe;
it fetches nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from qdc.core import canonical
from qdc.core.errors import QdcError
from qdc.core.files import write_atomic
from qdc.recipe.data import DatasetPrompts
from qdc.recipe.fields import PathSource
from qdc.recipe.load import Loaded, LockState, sources
from qdc.recipe.model import Recipe
from qdc.recipe.serving import RefBase
from qdc.store.trees import Entry, Tree

VERSION = 1
"""Of the lock's form. A lock of another version pins nothing; making it anew fetches only what the store lacks."""
MODE = 0o644
"""Of every file of a source: what `Store.ingest` gives to a file that nobody may run."""
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_WIDTH = 120


@dataclass(frozen=True)
class Locked:
    """One source. `identity`: the recipe's fields that name it; `files`: path -> (size in bytes, SHA-256);
    `facts`: ModelFacts as JSON, for a checkpoint; `licence`: the identifier that its README gives."""

    identity: dict[str, Any]
    files: dict[str, tuple[int, str]]
    facts: dict[str, Any] | None
    licence: str | None

    @property
    def tree(self) -> Tree:
        """The folder that holds the files."""
        return Tree(tuple(Entry(path, size, MODE, sha256) for path, (size, sha256) in sorted(self.files.items())))

    def as_json(self) -> dict[str, Any]:
        files = {path: {"size": size, "sha256": sha256} for path, (size, sha256) in self.files.items()}
        return {"identity": self.identity, "files": files, "facts": self.facts, "licence": self.licence}

    @classmethod
    def from_json(cls, value: Any) -> Locked:
        """Raises ValueError, KeyError or TypeError on anything but what `as_json` gives."""
        files = {}
        for path, entry in value["files"].items():
            if not safe(path) or not _SHA256.match(entry["sha256"]) or type(entry["size"]) is not int:
                raise ValueError(f"no file of a source: {path!r}")
            files[path] = (entry["size"], entry["sha256"])
        return cls(dict(value["identity"]), files, value["facts"], value["licence"])


def safe(path: str) -> bool:
    """Whether a file's path stays below its folder, on any system."""
    parts = PurePosixPath(path).parts
    return bool(parts) and "/".join(parts) == path and ".." not in parts and not re.search(r"[\\:\x00-\x1f]", path)


def lock_path(recipe: Path) -> Path:
    """Where the lock of a recipe is, or would be: `tiny.lock` beside `tiny.yaml`."""
    stem = recipe.name.removesuffix(".yaml").removesuffix(".yml")
    return recipe.with_name(f"{stem}.lock")


def lockable(model: Recipe) -> dict[str, dict[str, Any]]:
    """Every source whose bytes lie elsewhere: recipe path -> its identity. Folders and files of the user's own are
    pinned by their content, which is read at each build."""
    found = {
        ".".join(map(str, place)): source.model_dump(mode="json")
        for place, source in sources(model).items()
        if not isinstance(source, PathSource)
    }
    for name, entry in model.data.items():
        if isinstance(entry, DatasetPrompts):
            fields = ("hf_dataset", "revision", "splits")
            found[f"data.{name}"] = {field: getattr(entry, field) for field in fields}
    if isinstance(model.image.base, RefBase):
        found["image.base"] = {"ref": model.image.base.ref}
    return found


def read_lock(recipe: Path) -> dict[str, Locked] | None:
    """The lock of a recipe: recipe path -> source; None where there is none, or one of another version.

    Raises QdcError `lock.damaged` where the file is not a lock.
    """
    path = lock_path(recipe)
    try:
        value = json.loads(path.read_bytes())
        if value["version"] != VERSION:
            return None
        return {place: Locked.from_json(entry) for place, entry in value["sources"].items()}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise QdcError(
            "lock.damaged",
            f"this file is not a lock: {type(error).__name__}: {error}",
            file=path,
            line=getattr(error, "lineno", None),
            column=getattr(error, "colno", None),
            hint="restore it from version control, or remove it and run `qdc lock`",
        ) from None


def write_lock(recipe: Path, locked: Mapping[str, Locked]) -> bool:
    """Write the lock in one step; returns whether its bytes changed."""
    path, data = lock_path(recipe), lock_bytes(locked)
    if path.is_file() and path.read_bytes() == data:
        return False
    write_atomic(path, data)
    return True


def lock_bytes(locked: Mapping[str, Locked]) -> bytes:
    """Sorted JSON for people to read and compare: what fits a line is on one line, a tensor above all."""
    value = {"version": VERSION, "sources": {place: entry.as_json() for place, entry in locked.items()}}
    return (_pretty(value, "") + "\n").encode()


def _pretty(value: Any, indent: str) -> str:
    flat = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
    nested = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not nested or (len(indent) + len(flat) <= _WIDTH and not any(isinstance(item, dict) for item in nested)):
        return flat
    inner = indent + "  "
    if isinstance(value, dict):
        rows = [f"{json.dumps(key, ensure_ascii=False)}: {_pretty(value[key], inner)}" for key in sorted(value)]
    else:
        rows = [_pretty(item, inner) for item in value]
    start, end = "{}" if isinstance(value, dict) else "[]"
    return start + "\n" + ",\n".join(inner + row for row in rows) + "\n" + indent + end


def fitting(loaded: Loaded, locked: Mapping[str, Locked] | None) -> dict[str, Locked]:
    """The entries whose identity is the recipe's: recipe path -> source."""
    wanted = lockable(loaded.model)
    return {place: entry for place, entry in (locked or {}).items() if wanted.get(place) == entry.identity}


def state(loaded: Loaded) -> LockState:
    """How the lock beside the recipe fits it: what it lacks, and why."""
    recipe = recipe_path(loaded)
    name = lock_path(recipe).name
    wanted = lockable(loaded.model)
    if not wanted:
        return LockState()
    try:
        locked = read_lock(recipe)
    except QdcError as error:
        return LockState(dict.fromkeys(wanted, f"`{name}` cannot be read: {error.message}"))
    if locked is None:
        there = lock_path(recipe).is_file()
        why = f"`{name}` was made by another version of qdc" if there else f"there is no `{name}`"
        return LockState(dict.fromkeys(wanted, why))
    return LockState({place: _why(name, locked.get(place), wanted[place]) for place in _lacking(wanted, locked)})


def _lacking(wanted: Mapping[str, Any], locked: Mapping[str, Locked]) -> list[str]:
    return [place for place, identity in wanted.items() if place not in locked or locked[place].identity != identity]


def _why(name: str, old: Locked | None, identity: dict[str, Any]) -> str:
    if old is None:
        return f"`{name}` does not name it"
    was = {key: value for key, value in old.identity.items() if identity.get(key) != value}
    held = ", ".join(f"{key} {value}" for key, value in sorted(was.items()))
    return f"`{name}` holds another source for it" + (f": {held}" if held else "")


def recipe_path(loaded: Loaded) -> Path:
    """The recipe file, as it was named."""
    return Path(loaded.document.file)


def identity_digest(identity: dict[str, Any]) -> str:
    """One name for a source, wherever recipes name it."""
    return canonical.digest(identity)


def trees(loaded: Loaded) -> dict[str, Tree]:
    """The folder of every source that the lock pins: recipe path -> tree. A lock that cannot be read pins nothing."""
    try:
        return {place: entry.tree for place, entry in fitting(loaded, read_lock(recipe_path(loaded))).items()}
    except QdcError:
        return {}
