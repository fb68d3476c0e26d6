"""What stat shows of files, and digests remembered by it, so that unchanged files are not read again.

A remembered digest counts only if device, inode, size, mtime and ctime are the same and the file was already
older than one clock tick when it was read (git's racy rule). What stat cannot show is found by
`Store.verify`, which does not use this memo. Losing the memo costs time only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from pathlib import Path

from qdc.core import canonical
from qdc.core.files import sha256_file, write_atomic
from qdc.store.seal import sealed

TICK_NS = 50_000_000
REMEMBERED = 1 << 16
"""From which size on objects are remembered: reading a smaller one takes no longer than writing down that it was."""

Seen = list[int | str]
"""What stat shows of a file: [device, inode, size, mtime, ctime], times in ns."""


class StatMemo:
    """Path -> (what stat showed, SHA-256), kept in one small JSON file for each folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, dict[str, Seen]] = {}
        self._changed: set[str] = set()

    def digest(self, path: Path) -> str:
        """SHA-256 of the file, from memory where its stat allows."""
        known = self.known(path)
        if known is not None:
            return known
        before, started = seen(path), time.time_ns()
        sha256 = sha256_file(path)
        self.learn(path, before, sha256, started)
        return sha256

    def known(self, path: Path) -> str | None:
        """The remembered digest, if the file is still what it was by its stat."""
        folder, name = _place(path)
        remembered = self._load(folder).get(name)
        return str(remembered[5]) if remembered is not None and remembered[:5] == seen(path) else None

    def learn(self, path: Path, before: Seen, sha256: str, started: int) -> None:
        """Remember a digest that was read from `started` (ns) on, when stat showed `before`; forget what was
        known where the file has changed since, or was too young to tell."""
        if seen(path) == before and settled(before, started):
            self._keep(path, [*before, sha256])
        else:
            self._keep(path, None)

    def learn_object(self, path: Path, sha256: str) -> None:
        """Remember the digest of an object that was just renamed or sealed, if nobody has written to it since it was
        hashed: it is still sealed then. Its ctime is too young to tell."""
        status = os.stat(path)
        keep = sealed(status) and status.st_size >= REMEMBERED
        self._keep(path, [*signature(status), sha256] if keep else None)

    def save(self) -> None:
        """Write what was learnt; trouble here is no trouble (a read-only store works, only slower)."""
        for folder in self._changed:
            with contextlib.suppress(OSError):
                write_atomic(self._file(folder), canonical.dumps({"folder": folder, "files": self._known[folder]}))
        self._changed.clear()

    def _keep(self, path: Path, value: Seen | None) -> None:
        folder, name = _place(path)
        known = self._load(folder)
        if known.get(name) != value:
            self._changed.add(folder)
            if value is None:
                del known[name]
            else:
                known[name] = value

    def _load(self, folder: str) -> dict[str, Seen]:
        if folder not in self._known:
            self._known[folder] = {}
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                value = json.loads(self._file(folder).read_bytes())
                if value["folder"] == folder:
                    self._known[folder] = dict(value["files"])
        return self._known[folder]

    def _file(self, folder: str) -> Path:
        return self.folder / f"{hashlib.sha256(os.fsencode(folder)).hexdigest()[:24]}.json"


def seen(path: Path | str) -> Seen:
    """What stat shows of a file, or of the file that a link leads to."""
    return signature(os.stat(path))


def settled(before: Seen, started: int) -> bool:
    """Whether a file was older than a tick when reading it began: a later change then shows in its stat."""
    return max(int(before[3]), int(before[4])) < started - TICK_NS


def listing(place: str) -> dict[str, Seen]:
    """What stat shows of every file below the folder `place` (or of the file `place`): path -> [.., mode].

    Nothing is read. Two equal listings of settled files are the same tree. Raises OSError.
    """
    found: dict[str, Seen] = {}
    front = [("", place)]
    while front:
        name, path = front.pop()
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode) and not (name and os.path.islink(path)):
            front += [(f"{name}/{inner}", f"{path}/{inner}") for inner in os.listdir(path)]
        else:
            found[name] = [*signature(status), status.st_mode]
    return found


def _place(path: Path) -> tuple[str, str]:
    folder, name = os.path.split(os.path.realpath(path))
    return folder, name


def signature(status: os.stat_result) -> Seen:
    """What is compared of a file's status."""
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
