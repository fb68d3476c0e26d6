"""`qdc store verify`: every byte of the store read, and every document held against its name.

What is damaged is named with what depends on it, and removed: the next build makes that anew and nothing else. The
stat memo has no say here. Knows nothing of recipes; it says which stages and builds are touched by what records say.
"""

from __future__ import annotations

import errno
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from qdc.core import canonical
from qdc.core.files import sha256_file
from qdc.store.trees import Entry, Tree

THREADS = 2
Told = Callable[[int, int], None]
"""Told bytes read and bytes in all."""


@dataclass
class Finding:
    """Something that is not what it should be. `name`: digest, `key/n` or build id; `stays`: a whole document about
    what is missing, which says what to make anew.

    What depends on it: `trees` (digest -> paths in it), `stages` (key, n and instance of records that hold it as their
    output), `builds` (ids).
    """

    kind: Literal["object", "tree", "record", "build"]
    name: str
    problem: str
    path: Path
    stays: bool = False
    removed: bool = False
    trees: dict[str, list[str]] = field(default_factory=dict)
    stages: list[dict[str, Any]] = field(default_factory=list)
    builds: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        fields = ("kind", "name", "problem", "removed", "trees", "stages", "builds")
        return {name: getattr(self, name) for name in fields}


def verify(root: Path, told: Told = lambda done, total: None) -> list[Finding]:
    """Everything wrong in the store at `root`: objects first, then trees, records and builds. Changes nothing."""
    found = damaged_objects(root, told)
    lost = {item.name for item in found}
    trees, bad_trees = _trees(root)
    for digest, tree in trees.items():
        if lacking := [entry.path for entry in tree.entries if entry.sha256 not in lost and not _is_here(root, entry)]:
            problem = f"lacks {len(lacking)} of its {len(tree.entries)} files: {lacking[0]}"
            bad_trees.append(Finding("tree", digest, problem, _tree_path(root, digest), stays=True))
    records, bad_records = _records(root)
    known = trees.keys() | {item.name for item in bad_trees}
    for row in records:
        if row["output"] not in known:
            problem = f"its output, the tree {row['output']}, is not here"
            name = f"{row['key']}/{row['n']}"
            bad_records.append(Finding("record", name, problem, row["path"], stays=True, stages=[_stage(row)]))
    builds, bad_builds = _builds(root)
    for item in (*found, *bad_trees):
        _say_what_depends(item, trees, records, builds)
    return [*found, *bad_trees, *bad_records, *bad_builds]


def remove(findings: list[Finding]) -> None:
    """Remove what cannot be used, as far as the disk lets us."""
    for item in findings:
        if not item.stays:
            with suppress(OSError):
                item.path.unlink(missing_ok=True)
                item.removed = True


def damaged_objects(root: Path, told: Told = lambda done, total: None) -> list[Finding]:
    """Read every object, on two threads; those whose content is not what their name says."""
    paths = [path for path in sorted((root / "objects" / "sha256").glob("*/*")) if not path.name.startswith(".")]
    sizes = [_size(path) for path in paths]
    found, done, total = [], 0, sum(sizes)
    with ThreadPoolExecutor(THREADS) as pool:
        for path, size, problem in zip(paths, sizes, pool.map(_object_problem, paths), strict=True):
            done += size
            told(done, total)
            if problem is not None:
                found.append(Finding("object", path.name, problem, path))
    return found


def _object_problem(path: Path) -> str | None:
    try:
        sha256 = sha256_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"cannot be read: {error.strerror or errno.errorcode.get(error.errno or 0, 'input/output error')}"
    return None if sha256 == path.name else f"its content has the SHA-256 {sha256}"


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _documents(folder: Path, pattern: str) -> Iterator[tuple[Path, Any, str | None]]:
    """Path, value and problem of every JSON document, without unfinished ones (their names begin with a dot)."""
    for path in sorted(folder.glob(pattern)):
        if path.name.startswith("."):
            continue
        try:
            yield path, json.loads(path.read_bytes()), None
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not JSON; it is truncated or damaged"
            yield path, None, f"cannot be read: {reason}"


def _trees(root: Path) -> tuple[dict[str, Tree], list[Finding]]:
    trees, bad = {}, []
    for path, value, problem in _documents(root / "trees", "*.json"):
        if problem is None:
            try:
                tree = Tree.from_json(value)
                digest = tree.digest
                problem = None if digest == path.stem else f"its name is not its digest, {digest}"
            except (TypeError, ValueError, AttributeError):
                problem = "cannot be read: not a list of files"
        if problem is None:
            trees[path.stem] = tree
        else:
            bad.append(Finding("tree", path.stem, problem, path))
    return trees, bad


def _records(root: Path) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Rows {key, n, instance, output, path} of the good ones, and findings."""
    rows, bad = [], []
    for path, value, problem in _documents(root / "records", "*/*.json"):
        if not path.stem.isdecimal():
            continue
        key = path.parent.name
        problem = problem or record_problem(key, value)
        if problem is None:
            row = {"key": key, "n": int(path.stem), "instance": value.get("instance"), "output": value["output"]}
            rows.append({**row, "path": path})
        else:
            bad.append(Finding("record", f"{key}/{path.stem}", problem, path))
    return rows, bad


def record_problem(key: str, value: Any) -> str | None:
    """Why a JSON value is no record under `key`; None if it is one."""
    if not isinstance(value, dict) or not isinstance(value.get("output"), str):
        return "cannot be read: it names no output"
    if value.get("key") != key:
        return f"it is the record of another key, {value.get('key')}"
    try:
        found = canonical.digest(value["components"])
    except (KeyError, TypeError, ValueError):
        return "cannot be read: it has no components"
    return None if found == key else f"its components do not hash to its key, but to {found}"


def _builds(root: Path) -> tuple[dict[str, set[str]], list[Finding]]:
    """Build id -> digests of the trees that it names, and findings."""
    builds, bad = {}, []
    for path, value, problem in _documents(root / "builds", "*.json"):
        if problem is None and not isinstance(value, dict):
            problem = "cannot be read: not a build record"
        if problem is None:
            builds[path.stem] = build_trees(value)
        else:
            bad.append(Finding("build", path.stem, problem, path))
    return builds, bad


def build_trees(build: dict[str, Any]) -> set[str]:
    """Digests of all trees that a build record names: outputs and inputs of its stages, and the image's artifact."""
    found = {build["image"]["artifact"]} if "artifact" in (build.get("image") or {}) else set()
    for stage in build.get("stages", []):
        found |= {stage["output"], *(stage.get("inputs") or {}).values()}
    return found


def _tree_path(root: Path, digest: str) -> Path:
    return root / "trees" / f"{digest}.json"


def _is_here(root: Path, entry: Entry) -> bool:
    """Whether the object of a tree's entry is here with its size."""
    try:
        return os.stat(root / "objects" / "sha256" / entry.sha256[:2] / entry.sha256).st_size == entry.size
    except OSError:
        return False


def _stage(row: dict[str, Any]) -> dict[str, Any]:
    return {"key": row["key"], "n": row["n"], "instance": row["instance"]}


def _say_what_depends(
    item: Finding, trees: dict[str, Tree], records: list[dict[str, Any]], builds: dict[str, set[str]]
) -> None:
    if item.kind == "object":
        places: dict[str, list[str]] = defaultdict(list)
        for digest, tree in trees.items():
            for entry in tree.entries:
                if entry.sha256 == item.name:
                    places[digest].append(entry.path)
        item.trees = dict(places)
    touched = set(item.trees) if item.kind == "object" else {item.name}
    item.stages = [_stage(row) for row in records if row["output"] in touched]
    item.builds = sorted(id for id, named in builds.items() if named & touched)
