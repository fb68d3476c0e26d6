"""How files come into the store: copied from a folder of the user's, or moved from a stage's output folder.

Every file is read once: the pass that copies it hashes it, and what stat shows of the object is remembered, so that
using it soon needs no second look. Knows the store, not who asks.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import sha256_file
from qdc.store.copying import copy_hashed, hash_flushed, two_at_a_time
from qdc.store.memo import Seen, seen, signature
from qdc.store.store import Store, disk_errors
from qdc.store.trees import Entry, Tree, list_files

_OBJECT = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True)
class _File:
    """A file on its way. `name`: below its folder, with `/`; `before`: what stat showed at `looked` (ns)."""

    path: Path
    name: str
    mode: int
    looked: int
    before: Seen = field(hash=False)

    @property
    def size(self) -> int:
        return int(self.before[2])

    def entry(self, sha256: str) -> Entry:
        return Entry(self.name, self.size, self.mode, sha256)


class _Taken(NamedTuple):
    """What came of it, and whether this file became the object."""

    sha256: str
    new: bool


def ingest(store: Store, folder: Path) -> Tree:
    """Copy a folder of the user's into the store; files known by stat are not read again. A file becomes a tree with it
    alone, named `file`. Raises QdcError."""
    files = _files(folder)
    digests = {file: store.memo.known(file.path) for file in files}
    lacking = [file for file, sha256 in digests.items() if sha256 is None or not store.has(sha256, file.size)]
    try:
        for file, item in _copied(store, lacking):
            digests[file] = item.sha256
            store.memo.learn(file.path, file.before, item.sha256, file.looked)
            _learn_object(store, item)
    except QdcError as error:
        if error.id != "store.disk":
            raise
        digests |= _there_already(store, lacking, error)
    tree = Tree(tuple(file.entry(str(sha256)) for file, sha256 in digests.items()))
    store.add_tree(tree)
    store.memo.save()
    return tree


def _copied(store: Store, files: list[_File]) -> Iterator[tuple[_File, _Taken]]:
    if files:
        with store.staging() as work:
            numbered = list(enumerate(files))
            taken = two_at_a_time(lambda item: _copy(store, item[1], work / str(item[0])), numbered)
        yield from zip(files, taken, strict=True)


def _there_already(store: Store, files: list[_File], error: QdcError) -> dict[_File, str | None]:
    """The digests of files that a store which takes nothing holds; raises `error` where it lacks one."""
    hashed = two_at_a_time(lambda file: sha256_file(file.path), files)
    found: dict[_File, str | None] = dict(zip(files, hashed, strict=True))
    if any(not store.has(str(sha256), file.size) for file, sha256 in found.items()):
        raise error
    return found


def publish(store: Store, folder: Path) -> Tree:
    """Move a finished folder into the store. A link in it that leads to an object is that object, which is not read
    again; any other link is refused. Raises QdcError."""
    files = _files(folder)
    digests = {file: _passed_on(store, file.path) for file in files if file.path.is_symlink()}
    moving = [file for file in files if file not in digests]
    for file, item in zip(moving, two_at_a_time(lambda file: _move(store, file), moving), strict=True):
        digests[file] = item.sha256
        _learn_object(store, item)
    tree = Tree(tuple(file.entry(digests[file]) for file in files))
    store.add_tree(tree)
    return tree


def _files(folder: Path) -> list[_File]:
    found = []
    for path in list_files(folder, links=True) if folder.is_dir() else [folder]:
        looked, status = time.time_ns(), os.stat(path)
        mode = 0o755 if status.st_mode & 0o100 else 0o644
        name = path.relative_to(folder).as_posix() if path != folder else "file"
        found.append(_File(path, name, mode, looked, signature(status)))
    return found


def _copy(store: Store, file: _File, place: Path) -> _Taken:
    with file.path.open("rb", buffering=0) as stream, disk_errors():
        sha256 = copy_hashed(stream.fileno(), place)
    if seen(file.path) != file.before:
        raise QdcError(
            "store.changing",
            f"`{file.path}` changed while it was read",
            exit_code=COULD_NOT,
            hint="build again when nothing writes to it",
        )
    return _Taken(sha256, store.adopt(place, sha256))


def _move(store: Store, file: _File) -> _Taken:
    with disk_errors():
        sha256 = hash_flushed(file.path)
    return _Taken(sha256, store.adopt(file.path, sha256))


def _passed_on(store: Store, path: Path) -> str:
    """The digest of the object that a link leads to."""
    place = Path(os.path.realpath(path))
    if not _OBJECT.match(place.name) or place != Path(os.path.realpath(store.object_path(place.name))):
        raise QdcError("store.link", f"a link, but not to an object of the store: {path}", exit_code=COULD_NOT)
    if store.memo.digest(place) != place.name:
        raise store.damaged(place.name, path.name)
    return place.name


def _learn_object(store: Store, item: _Taken) -> None:
    if item.new:
        with contextlib.suppress(OSError):
            store.memo.learn_object(store.object_path(item.sha256), item.sha256)
