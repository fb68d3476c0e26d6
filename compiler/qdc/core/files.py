"""Bytes on disk: digests and atomic writes.

A file written here is either the old one or the new one, whole, after any interruption.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import IO, Any

from qdc.core import canonical

CHUNK = 1 << 20


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_stream(stream: IO[bytes]) -> tuple[str, int]:
    """Read `stream` to its end; return its SHA-256 (hex) and its length in bytes."""
    state, size = hashlib.sha256(), 0
    while chunk := stream.read(CHUNK):
        state.update(chunk)
        size += len(chunk)
    return state.hexdigest(), size


def sha256_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fsync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write `data` beside `path`, fsync, rename over it, fsync the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    import tempfile

    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    fsync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Sorted, indented JSON; for stage outputs (no fsync: publishing the stage does that)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(canonical.pretty(value))
