"""A file or a folder that grows beside its place under a hidden name, and is put there when it is whole.

Whoever writes one holds a lock on it, which ends with its process however that ends. So what a killed process left is
told from what is being written, and goes with the next writing at the same place. Knows nothing of what is written.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from qdc.core.files import fsync_folder

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_SUFFIX = ".partial"
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


@contextlib.contextmanager
def new_file(place: Path) -> Iterator[IO[bytes]]:
    """An unbuffered stream whose bytes are at `place` when the block ends well; else nothing of them stays."""
    with _begun(place, folder=False) as (path, descriptor):
        with os.fdopen(os.dup(descriptor), "wb", buffering=0) as stream:
            yield stream
            os.fsync(stream.fileno())
        path.chmod(0o644)
        path.replace(place)
    fsync_folder(place.parent)


@contextlib.contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """A folder that is at `place` when the block ends well, instead of the one there; else nothing of it stays."""
    with _begun(place, folder=True) as (path, _):
        path.chmod(0o755)
        yield path
        if not place.exists():
            path.rename(place)
        elif not _exchange(path, place):
            old = _new_folder(place)
            place.rename(old / "replaced")
            path.rename(place)
            _remove(old)
        fsync_folder(place.parent)


def sweep(place: Path) -> None:
    """Remove what killed processes left beside `place`; what a living one writes stays."""
    left = re.compile(re.escape(f".{place.name}.") + r"[a-z0-9_]{8}" + re.escape(_SUFFIX))
    for path in [entry for entry in place.parent.iterdir() if left.fullmatch(entry.name)]:
        with contextlib.suppress(OSError):  # Held, another user's, or gone already.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def _begun(place: Path, *, folder: bool) -> Iterator[tuple[Path, int]]:
    """An empty file or folder beside `place`, and its descriptor, which holds its lock; gone when the block ends."""
    while True:
        path, descriptor = _made(place, folder)
        if descriptor is not None:
            break
    try:
        yield path, descriptor
    finally:
        _remove(path)
        os.close(descriptor)


def _made(place: Path, folder: bool) -> tuple[Path, int | None]:
    """The new one and its locked descriptor; None where a sweep came before the lock."""
    if folder:
        path = _new_folder(place)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return path, None
    else:
        descriptor, name = tempfile.mkstemp(_SUFFIX, f".{place.name}.", place.parent)
        path = Path(name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return path, None
    except OSError:
        return path, descriptor  # A file system without locks: there nothing is swept either.
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), path.lstat()):
            return path, descriptor
    os.close(descriptor)
    return path, None


def _new_folder(place: Path) -> Path:
    return Path(tempfile.mkdtemp(_SUFFIX, f".{place.name}.", place.parent))


def _exchange(new: Path, place: Path) -> bool:
    """Let two names change what they name, in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(place), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(place))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
