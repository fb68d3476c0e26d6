"""A recipe file to stage instances, remembered by the content of all that it was made from.

Parsing and rules take most of a second; when the recipe, the files it names, the locks and qdc's own code have
the bytes that they had, the instances are read back instead. Nothing here decides freshness.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qdc.core import canonical
from qdc.core.files import sha256_file, write_atomic
from qdc.graph.instances import Instance
from qdc.run.settings import training_bytes
from qdc.store.store import Store

PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Front:
    """`recipe`: resolved fields; `digest`: SHA-256 of the recipe file as it was read; `instances`: in an order in
    which inputs come first; `warnings`: as text; `origins`: recipe path -> `file:line` or `--set`; `missing`: recipe
    path and what no stage can make; `facts`: recipe path of a checkpoint -> `ModelFacts` as JSON."""

    recipe: dict[str, Any]
    digest: str
    instances: list[Instance]
    warnings: list[str]
    origins: dict[str, str]
    missing: list[tuple[str, str]]
    facts: dict[str, Any]


def front(path: Path, sets: list[str], store: Store) -> Front:
    """Read a recipe; raises RecipeInvalid or QdcError. A store that cannot be written works, only slower."""
    memo = store.root / "memo" / "front" / f"{canonical.digest([str(path.resolve()), sets])}.json"
    code = _package_signature()
    remembered = _remembered(memo, path, code)
    if remembered is not None:
        return remembered
    return _read(path, sets, store, memo, code)


def _remembered(memo: Path, path: Path, code: str) -> Front | None:
    try:
        value = json.loads(memo.read_bytes())
        same = (
            value["code"] == code
            and not value["sources"]
            and value["training_bytes"] == training_bytes()
            and all(sha256_file(Path(name)) == digest for name, digest in value["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError):
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
    )


def _read(path: Path, sets: list[str], store: Store, memo: Path, code: str) -> Front:
    from qdc.graph.code import code_digests
    from qdc.graph.expand import expand
    from qdc.graph.locks import lock_text, versions
    from qdc.graph.support import unsupported
    from qdc.recipe.load import load
    from qdc.rules.check import require
    from qdc.sources.facts import attach

    loaded = replace(attach(load(path, sets)), training_bytes=training_bytes())
    warnings = [str(item) for item in require(loaded)]
    sources = {
        name: store.ingest(place).digest if place.is_dir() else sha256_file(place)
        for name, place in loaded.folders.items()
    }
    serve_lock = lock_text("serve")
    facts = {
        "code": code_digests(),
        "versions": versions(lock_text("train")),
        "chat_template": loaded.chat_template,
        "serve_lock": serve_lock,
        "templates": loaded.templates,
        "sources": sources,
        "trees": sources,
    }
    instances, missing = expand(loaded.data, facts), unsupported(loaded.data)
    value = {
        "code": code,
        "sources": sources,
        "files": loaded.read,
        "recipe": loaded.data,
        "warnings": warnings,
        "origins": loaded.origins,
        "missing": missing,
        "facts": {place: known.as_json() for place, known in loaded.facts.items()},
        "training_bytes": loaded.training_bytes,
        "instances": [item.as_json() for item in instances],
    }
    with contextlib.suppress(OSError):
        write_atomic(memo, canonical.dumps(value))
    return Front(loaded.data, loaded.document.sha256, instances, warnings, loaded.origins, missing, value["facts"])


def _package_signature() -> str:
    """Digest of path, size, mtime, ctime and inode of each file of the package and the data beside it."""
    rows = []
    roots = [PACKAGE]
    templates = PACKAGE.parents[1] / "templates"
    if templates.is_dir() and (PACKAGE.parents[1] / "compiler" / "qdc") == PACKAGE:
        roots.append(templates)
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(names):
                place = os.path.join(folder, name)
                status = os.stat(place)
                rows.append([place, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino])
    return canonical.digest(rows)
