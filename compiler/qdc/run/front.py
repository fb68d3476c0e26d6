"""A recipe file to stage instances, remembered by the content of all that it was made from.

Parsing and rules take most of a second; when the recipe, the files it names, the locks and qdc's own code have
the bytes that they had, the instances are read back instead. Nothing here decides freshness.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdc.core import canonical
from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import sha256_file, write_atomic
from qdc.graph.instances import Instance
from qdc.graph.plan import Stage
from qdc.graph.signature import package_signature
from qdc.run.code import digests
from qdc.run.settings import training_bytes
from qdc.store.memo import listing, settled
from qdc.store.store import Store
from qdc.store.trees import Tree

if TYPE_CHECKING:
    from qdc.recipe.load import Loaded


@dataclass(frozen=True)
class Front:
    """`recipe`: resolved fields; `digest`: SHA-256 of the recipe file as it was read; `instances`: in an order in
    which inputs come first; `warnings`: as text; `origins`: recipe path -> `file:line` or `--set`; `missing`: recipe
    path and what no stage can make; `facts`: recipe path of a checkpoint -> `ModelFacts` as JSON; `unlocked`:
    findings about the lock, as text; `locked`: tree digest of a locked source -> what it is; `base_bytes`: of a given
    base as it is stored, where it is at hand."""

    recipe: dict[str, Any]
    digest: str
    instances: list[Instance]
    warnings: list[str]
    origins: dict[str, str]
    missing: list[tuple[str, str]]
    facts: dict[str, Any]
    unlocked: list[str] = field(default_factory=list)
    locked: dict[str, str] = field(default_factory=dict)
    base_bytes: int | None = None
    signature: str = ""


def front(path: Path, sets: list[str], store: Store) -> Front:
    """Read a recipe; raises RecipeInvalid or QdcError. A store that cannot be written works, only slower."""
    memo = store.root / "memo" / "front" / f"{canonical.digest([str(path.resolve()), sets])}.json.z"
    code = package_signature()
    remembered = _remembered(memo, path, store, code)
    if remembered is not None:
        return remembered
    return _read(path, sets, store, memo, code)


def _remembered(memo: Path, path: Path, store: Store, code: str) -> Front | None:
    try:
        value = json.loads(zlib.decompress(memo.read_bytes()))
        same = (
            value["code"] == code
            and value["lock"] == [str(path.absolute()), value["lock"][1], _digest(Path(value["lock"][1]))]
            and value["training_bytes"] == training_bytes()
            and all(sha256_file(Path(name)) == digest for name, digest in value["files"].items())
            and all(_same_folder(store, given) for given in value["folders"].values())
        )
    except (OSError, ValueError, KeyError, TypeError, zlib.error):
        return None
    if not same or str(path.resolve()) not in value["files"]:
        return None
    return Front(
        value["recipe"],
        value["files"][str(path.resolve())],
        [Instance.from_json(item) for item in value["instances"]],
        value["warnings"],
        value["origins"],
        [(path, what) for path, what in value["missing"]],
        value["facts"],
        value["unlocked"],
        value["locked"],
        value["base_bytes"],
        code,
    )


def _same_folder(store: Store, given: dict[str, Any]) -> bool:
    """Whether a folder (or file) of the user's is what it was, by the stat of all that is in it, and is kept here."""
    seen = given["seen"]
    return seen is not None and listing(given["path"]) == seen and store.has_tree(given["digest"])


def _look(place: Path) -> dict[str, Any]:
    """What stat shows of a folder (or file) of the user's, before anything in it is read."""
    return {"path": str(place), "looked": time.time_ns(), "seen": listing(str(place))}


def _take(store: Store, looked: dict[str, Any]) -> dict[str, Any]:
    """Take in what was looked at; `seen` becomes null where something is too young to be known by its stat.

    Raises QdcError where it has changed since: what was read of it would not fit together.
    """
    place = Path(looked["path"])
    digest = store.ingest(place).digest
    if listing(looked["path"]) != looked["seen"]:
        raise QdcError(
            "store.changing",
            f"`{place}` changed while it was read",
            exit_code=COULD_NOT,
            hint="build again when nothing writes to it",
        )
    known = all(settled(row, looked["looked"]) for row in looked["seen"].values())
    return {**looked, "digest": digest, "seen": looked["seen"] if known else None}


def _read(path: Path, sets: list[str], store: Store, memo: Path, code: str) -> Front:
    from qdc.graph.expand import expand
    from qdc.graph.locks import lock_text, serve_lock, versions
    from qdc.graph.support import unsupported
    from qdc.recipe.load import load
    from qdc.rules.check import require
    from qdc.serving.render import drafter_kind
    from qdc.sources.facts import attach
    from qdc.sources.lock import lock_path, trees

    beside = lock_path(path.absolute())
    held = [str(path.absolute()), str(beside), _digest(beside)]
    loaded = load(path, sets)
    looked = {name: _look(place) for name, place in loaded.folders.items()}
    loaded = replace(attach(loaded), training_bytes=training_bytes())
    pinned = trees(loaded)
    warnings = [str(item) for item in require(loaded)]
    taken = {name: _take(store, given) for name, given in looked.items()}
    folders = {name: given["digest"] for name, given in taken.items()}
    facts = {
        "code": digests(store, code),
        "versions": versions(lock_text("train")),
        "chat_template": loaded.chat_template,
        "serve_lock": serve_lock(drafter_kind(loaded.data.get("drafter"))),
        "templates": loaded.templates,
        "sources": folders | {place: tree.digest for place, tree in pinned.items()},
        "trees": folders,
        "pins": {place: tree.digest for place, tree in sorted(pinned.items())},
        "licences": [
            {"source": place, "licence": known.licence}
            for place, known in sorted(loaded.facts.items())
            if known.licence is not None and not place.endswith(".init")
        ],
    }
    instances, missing = expand(loaded.data, facts), unsupported(loaded.data)
    value: dict[str, Any] = {
        "code": code,
        "folders": taken,
        "lock": held,
        "files": loaded.read,
        "recipe": loaded.data,
        "warnings": warnings,
        "origins": loaded.origins,
        "missing": missing,
        "facts": {place: known.as_json() for place, known in loaded.facts.items()},
        "training_bytes": loaded.training_bytes,
        "unlocked": _unlocked(loaded),
        "locked": {tree.digest: _described(place, tree) for place, tree in pinned.items()},
        "base_bytes": _base_bytes(store, pinned, folders),
        "instances": [item.as_json() for item in instances],
    }
    with contextlib.suppress(OSError):
        write_atomic(memo, zlib.compress(canonical.dumps(value), 1))
    return Front(
        loaded.data,
        loaded.document.sha256,
        instances,
        warnings,
        loaded.origins,
        missing,
        value["facts"],
        value["unlocked"],
        value["locked"],
        value["base_bytes"],
        code,
    )


def _base_bytes(store: Store, pinned: dict[str, Tree], folders: dict[str, str]) -> int | None:
    """Bytes of what `image.base` names, if it is given: all but some kB are its layers."""
    tree = pinned.get("image.base") or store.tree(folders.get("image.base", ""))
    return tree.size if tree is not None else None


def _described(place: str, tree: Tree) -> str:
    return f"{place} ({len(tree.entries)} files, {tree.size} bytes)"


def _unlocked(loaded: Loaded) -> list[str]:
    from qdc.recipe.diagnostics import RecipeInvalid
    from qdc.rules.check import require_lock
    from qdc.sources.lock import state

    if loaded.lock is not None:
        return []
    try:
        require_lock(loaded, state(loaded))
    except RecipeInvalid as invalid:
        return [str(item) for item in invalid.diagnostics]
    return []


def require_lock(read: Front, path: Path, sets: list[str]) -> None:
    """Before a build: raises RecipeInvalid (SRC04) where the lock does not fit."""
    if read.unlocked:
        from qdc.recipe.load import load
        from qdc.rules import check
        from qdc.sources.facts import attach
        from qdc.sources.lock import state

        loaded = attach(load(path, sets))
        check.require_lock(loaded, state(loaded))


def require_bytes(read: Front, path: Path, store: Store, stages: Iterable[Stage]) -> None:
    """Before a build: raises QdcError where a stale stage reads a locked source whose bytes are not here."""
    stale = [stage for stage in stages if stage.state == "stale"]
    digests = {digest for stage in stale for digest in stage.inputs.values() if digest in read.locked}
    lacking = sorted(read.locked[digest] for digest in digests if not store.has_tree(digest))
    if lacking:
        raise QdcError(
            "build.fetch",
            f"the store lacks the bytes of {'; '.join(lacking)}",
            file=path,
            exit_code=COULD_NOT,
            hint=f"type `qdc lock {path}`: it fetches what the lock pins",
        )


def _digest(path: Path) -> str | None:
    try:
        return sha256_file(path)
    except OSError:
        return None
