"""`qdc store gc`: which builds to forget, and what then no kept build names. Decides; `sweep` removes.

A decision is a pure function of what the store holds, the policy and the time. Ages are those of files, so that what
was fetched lately is young. Builds are known by their records alone; recipes and lock files are not read.

What stays: what kept builds name; records younger than the age (a failed build's finished stages) and all that these
were made from; trees and objects younger than the age that are no stage's output (what `qdc lock` fetched).
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qdc.core.errors import COULD_NOT, QdcError
from qdc.store.trees import Tree
from qdc.store.verify import build_trees

DAY_S = 86400.0
UNFINISHED_S = DAY_S
"""How old a file that was never renamed into place must be to be swept."""


@dataclass(frozen=True)
class Policy:
    """`keep_builds`: of each recipe file, the newest so many always stay; `older_than_s`: the others go at this age,
    in seconds; `max_bytes`: the oldest of them go until what stays is no larger, or None."""

    keep_builds: int = 3
    older_than_s: float = 30 * DAY_S
    max_bytes: int | None = None


@dataclass(frozen=True)
class Document:
    """A JSON file of the store: `value` is None where it cannot be read; `mtime` in seconds."""

    path: Path
    value: Any
    mtime: float
    size: int


@dataclass
class Holdings:
    """All that the store holds. `forgotten`: builds and trees that an interrupted gc had begun to remove."""

    root: Path
    builds: dict[str, Document] = field(default_factory=dict)
    records: dict[str, list[Document]] = field(default_factory=dict)
    trees: dict[str, Document] = field(default_factory=dict)
    objects: dict[str, tuple[Path, int, float]] = field(default_factory=dict)
    forgotten_builds: dict[str, Document] = field(default_factory=dict)
    forgotten_trees: dict[str, Document] = field(default_factory=dict)

    def has(self, digest: object) -> bool:
        """Whether a tree and all its files are here."""
        tree = self.trees.get(digest) if isinstance(digest, str) else None
        return tree is not None and all(
            self.objects.get(entry.sha256, (None, -1))[1] == entry.size for entry in _entries(tree)
        )


@dataclass
class Decision:
    """What goes, as files; `bytes`: their sizes. `builds`: id and recipe file of those to forget; `unreached`: bytes
    that stay beyond the wanted size, because only kept builds and young work are left."""

    builds: list[tuple[str, str]] = field(default_factory=list)
    build_files: list[Path] = field(default_factory=list)
    records: list[Path] = field(default_factory=list)
    trees: list[Path] = field(default_factory=list)
    objects: list[Path] = field(default_factory=list)
    rest: list[Path] = field(default_factory=list)
    bytes: int = 0
    stays: int = 0
    unreached: int = 0

    @property
    def empty(self) -> bool:
        return not (self.build_files or self.records or self.trees or self.objects or self.rest)

    def as_json(self) -> dict[str, Any]:
        counts = {name: len(getattr(self, name)) for name in ("records", "trees", "objects", "rest")}
        builds = [{"build": id, "recipe_file": file} for id, file in self.builds]
        return {"builds": builds, **counts, "bytes": self.bytes, "stays": self.stays, "unreached": self.unreached}


def holdings(root: Path) -> Holdings:
    """Read every document and stat every object. Raises QdcError where a build record cannot be read: nobody knows
    what it names."""
    found = Holdings(root)
    found.builds = {item.path.stem: item for item in _documents(root / "builds", "*.json")}
    for id, item in found.builds.items():
        if not isinstance(item.value, dict):
            raise QdcError(
                "store.unreadable",
                f"the record of build {id} cannot be read, so nobody knows what it needs",
                file=item.path,
                exit_code=COULD_NOT,
                hint="`qdc store verify` removes it; then run the same command again",
            )
    records: dict[str, list[Document]] = defaultdict(list)
    for item in _documents(root / "records", "*/*.json"):
        if item.path.stem.isdecimal():
            records[item.path.parent.name].append(item)
    found.records = dict(records)
    found.trees = {item.path.stem: item for item in _documents(root / "trees", "*.json")}
    forgotten = root / "forgotten"
    found.forgotten_builds = {item.path.stem: item for item in _documents(forgotten / "builds", "*.json")}
    found.forgotten_trees = {item.path.stem: item for item in _documents(forgotten / "trees", "*.json")}
    for path in (root / "objects" / "sha256").glob("*/*"):
        if (status := _stat(path)) is not None and not path.name.startswith("."):
            found.objects[path.name] = (path, status.st_size, status.st_mtime)
    return found


def decide(held: Holdings, policy: Policy, now: float) -> Decision:
    """What the policy lets go. The same decision twice in a row finds nothing the second time."""
    free = _free_builds(held, policy.keep_builds)
    old = [id for id in free if now - held.builds[id].mtime > policy.older_than_s]
    more = [id for id in free if id not in old]
    count = 0
    if policy.max_bytes is not None:
        count = _fewest(held, policy, now, old, more)
    return _Reach(held, policy, now, {*old, *more[:count]}).decision()


def _fewest(held: Holdings, policy: Policy, now: float, old: list[str], more: list[str]) -> int:
    """How many of the builds `more`, oldest first, must go to get under the size (by halving)."""
    low, high = 0, len(more)
    while low < high:
        middle = (low + high) // 2
        if _Reach(held, policy, now, {*old, *more[:middle]}).decision().unreached:
            low = middle + 1
        else:
            high = middle
    return low


def _free_builds(held: Holdings, keep: int) -> list[str]:
    """Builds that the policy may forget, oldest first: all but the newest `keep` of each recipe file."""
    of_recipe: dict[str, list[str]] = defaultdict(list)
    for id in sorted(held.builds):
        of_recipe[str(held.builds[id].value.get("recipe_file"))].append(id)
    return sorted(id for ids in of_recipe.values() for id in ids[: max(0, len(ids) - keep)])


class _Reach:
    """What stays and what goes once the builds `forget` are forgotten."""

    def __init__(self, held: Holdings, policy: Policy, now: float, forget: set[str]) -> None:
        self.held, self.policy, self.now, self.forget = held, policy, now, forget
        self.left = {**held.forgotten_builds, **{id: held.builds[id] for id in forget}}
        self.keys: set[str] = set()
        self.trees: set[str] = set()
        self._follow()

    def young(self, mtime: float) -> bool:
        return self.now - mtime <= self.policy.older_than_s

    def _follow(self) -> None:
        """Find the keys and trees that stay: what kept builds name, young records, and what those were made from."""
        for id, build in self.held.builds.items():
            if id not in self.forget:
                self.keys |= {stage["key"] for stage in build.value.get("stages", []) if "key" in stage}
                self.trees |= build_trees(build.value)
        let_go: dict[str, float] = {}
        for item in self.left.values():
            for stage in _stages(item):
                let_go[stage.get("key", "")] = max(item.mtime, let_go.get(stage.get("key", ""), item.mtime))
        usable = {key: [row for row in rows if self._usable(key, row)] for key, rows in self.held.records.items()}
        makers: dict[str, list[str]] = defaultdict(list)
        for key, rows in usable.items():
            for row in rows:
                makers[row.value["output"]].append(key)
        front = list(self.keys)
        for key, rows in usable.items():
            # A record that a forgotten build was made from goes with it, unless it was made anew since.
            if any(self.young(row.mtime) and row.mtime > let_go.get(key, row.mtime - 1) for row in rows):
                front.append(key)
        self.keys = set()
        while front:
            key = front.pop()
            if key in self.keys:
                continue
            self.keys.add(key)
            for row in usable.get(key, []):
                inputs = set((row.value.get("components") or {}).get("inputs", {}).values())
                self.trees |= {row.value["output"], *inputs}
                front += [maker for digest in inputs for maker in makers.get(digest, [])]
        self.usable = usable

    def _usable(self, key: str, row: Document) -> bool:
        return isinstance(row.value, dict) and row.value.get("key") == key and self.held.has(row.value.get("output"))

    def decision(self) -> Decision:
        made = Decision()
        for id in sorted(self.forget):
            made.builds.append((id, str(self.held.builds[id].value.get("recipe_file"))))
        made.build_files = [item.path for item in self.left.values()]
        size = sum(item.size for item in self.left.values())
        for key, rows in self.held.records.items():
            going = [row for row in rows if key not in self.keys or row not in self.usable[key]]
            made.records += [row.path for row in going]
            size += sum(row.size for row in going)
        going_trees = self._going_trees()
        made.trees = [item.path for item in going_trees.values()]
        size += sum(item.size for item in going_trees.values())
        staying = [item for digest, item in self.held.trees.items() if digest not in going_trees]
        alive = {entry.sha256 for item in staying for entry in _entries(item)}
        doomed = [*going_trees.values(), *self.held.forgotten_trees.values()]
        spoken = {entry.sha256 for item in doomed for entry in _entries(item)}
        for sha256, (path, bytes_, mtime) in sorted(self.held.objects.items()):
            if sha256 in alive or (self.young(mtime) and sha256 not in spoken):
                made.stays += bytes_
            else:
                made.objects.append(path)
                size += bytes_
        self._rest(made)
        made.bytes += size
        if self.policy.max_bytes is not None:
            made.unreached = max(0, made.stays - self.policy.max_bytes)
        return made

    def _going_trees(self) -> dict[str, Document]:
        rows = [row.value for rows in self.held.records.values() for row in rows if isinstance(row.value, dict)]
        outputs = {value.get("output") for value in rows}
        outputs |= {stage.get("output") for item in self.left.values() for stage in _stages(item)}
        outputs |= set(self.held.forgotten_trees)
        return {
            digest: item
            for digest, item in self.held.trees.items()
            if digest not in self.trees and (digest in outputs or not self.young(item.mtime) or item.value is None)
        }

    def _rest(self, made: Decision) -> None:
        """Logs, partial work and memos of what goes, and files that were never renamed into place."""
        root = self.held.root
        for path in _listed(root / "logs"):
            if path.stem not in self.keys and not self.young(_mtime(path)):
                self._goes(made, path)
        for path in _listed(root / "partial"):
            if self.usable.get(path.name) or not self.young(max(_mtime(inner) for inner in (path, *_below(path)))):
                self._goes(made, path)
            else:
                made.stays += sum(_size(inner) for inner in _below(path))
        for item in _documents(root / "log", "*.json"):
            build = item.value.get("build") if isinstance(item.value, dict) else None
            kept = build in self.held.builds and build not in self.forget
            if not kept and (build in self.left or not self.young(item.mtime)):
                self._goes(made, item.path)
        for item in _documents(root / "memo" / "latest", "*.json"):
            key = item.value.get("key") if isinstance(item.value, dict) else None
            if key not in self.keys or not self.usable.get(str(key)):
                self._goes(made, item.path)
        rows = [row.value for key in self.keys for row in self.usable.get(key, [])]
        codes = {(value.get("components") or {}).get("code") for value in rows}
        for path in (*_listed(root / "memo" / "front"), *_listed(root / "memo" / "code")):
            if path.stem not in codes and not self.young(_mtime(path)):
                self._goes(made, path)
        for path in _listed(root / "records"):
            if path.name not in self.held.records and self.now - _mtime(path) > UNFINISHED_S:
                self._goes(made, path)
        for pattern in ("trees/.*", "builds/.*", "log/.*", "records/*/.*", "memo/.*", "memo/*/.*"):
            for path in sorted(root.glob(pattern)):
                if self.now - _mtime(path) > UNFINISHED_S:
                    self._goes(made, path)

    def _goes(self, made: Decision, path: Path) -> None:
        made.rest.append(path)
        made.bytes += sum(_size(inner) for inner in _below(path)) if path.is_dir() else _size(path)


def _entries(item: Document) -> Iterable[Any]:
    return item.value.entries if isinstance(item.value, Tree) else ()


def _stages(item: Document) -> list[dict[str, Any]]:
    return list(item.value.get("stages", [])) if isinstance(item.value, dict) else []


def _documents(folder: Path, pattern: str) -> Iterator[Document]:
    """The JSON files of a folder; trees as `Tree`, None where the bytes are not what the name says."""
    for path in sorted(folder.glob(pattern)):
        if path.name.startswith(".") or (status := _stat(path)) is None:
            continue
        value = None
        try:
            value = json.loads(path.read_bytes())
            if folder.name == "trees":
                tree = Tree.from_json(value)
                value = tree if tree.digest == path.stem else None
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            value = None
        yield Document(path, value, status.st_mtime, status.st_size)


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def _below(folder: Path) -> list[Path]:
    return [Path(place) / name for place, _, names in os.walk(folder) for name in names]


def _stat(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _mtime(path: Path) -> float:
    status = _stat(path)
    return status.st_mtime if status is not None else 0.0


def _size(path: Path) -> int:
    status = _stat(path)
    return status.st_size if status is not None else 0
