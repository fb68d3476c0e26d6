"""Digests of files remembered by their stat, so that unchanged files are not read again.

A remembered digest counts only if device, inode, size, mtime and ctime are the same and the file was already
older than one clock tick when it was read (git's racy rule). What stat cannot show is found by
`Store.verify`, which does not use this memo. Losing the memo costs time only.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from qdc.core import canonical
from qdc.core.files import sha256_file, write_atomic

TICK_NS = 50_000_000


class StatMemo:
    """Path -> (stat, SHA-256), kept in one JSON file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._known: dict[str, list[int | str]] | None = None
        self._changed = False

    def digest(self, path: Path) -> str:
        """SHA-256 of the file, from memory where its stat allows."""
        known = self._load()
        name = os.path.realpath(path)
        before = _signature(os.stat(name))
        remembered = known.get(name)
        if remembered is not None and remembered[:5] == before:
            return str(remembered[5])
        started = time.time_ns()
        sha256 = sha256_file(Path(name))
        after = _signature(os.stat(name))
        if before == after and max(int(after[3]), int(after[4])) < started - TICK_NS:
            known[name] = [*after, sha256]
        else:
            known.pop(name, None)
        self._changed = True
        return sha256

    def save(self) -> None:
        """Write what was learnt; trouble here is no trouble (a read-only store works, only slower)."""
        if self._changed and self._known is not None:
            with contextlib.suppress(OSError):
                write_atomic(self.file, canonical.dumps(self._known))
            self._changed = False

    def _load(self) -> dict[str, list[int | str]]:
        if self._known is None:
            try:
                value = json.loads(self.file.read_bytes())
                self._known = value if isinstance(value, dict) else {}
            except (OSError, ValueError):
                self._known = {}
        return self._known


def _signature(status: os.stat_result) -> list[int | str]:
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
