"""Bytes on their way into the store: copied and hashed in one pass, two files at a time.

A block is read and hashed while the one before it is written. Writing goes past the page cache where the file system
allows: filling the cache takes longer than hashing. Knows files, not the store.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from qdc.core.files import sha256_file
from qdc.store.seal import seal

AT_ONCE = 2
BLOCK, SLICE, BUFFERS = 1 << 22, 1 << 18, 4
"""Bytes that are written at a time, and read and hashed at a time; blocks in memory for a file."""
ALIGNED = 1 << 12
"""What a write past the page cache must be a multiple of; more than disks ask for."""

FICLONE = 0x40049409
"""Linux's request to share a whole file's blocks (linux/fs.h)."""

Given = TypeVar("Given")
Made = TypeVar("Made")


def two_at_a_time(work: Callable[[Given], Made], given: Iterable[Given]) -> list[Made]:
    """`work` of each, in order. Of several that fail, the first one's error; what has not begun is left."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = [pool.submit(work, item) for item in given]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def copy_hashed(reading: int, target: Path) -> str:
    """Copy an open file to a new read-only one, sealed and on disk when this returns; the SHA-256 of the copy."""
    with contextlib.ExitStack() as opened:
        writing = _create(target)
        opened.callback(os.close, writing)
        sha256 = sha256_file(target) if _clone(reading, writing) else _pass(reading, writing)
        os.fchmod(writing, 0o444)
        seal(writing)
        os.fsync(writing)
    return sha256


def _clone(reading: int, writing: int) -> bool:
    """Share the file's blocks where the file system can: nothing is written, and the clone is of one moment."""
    try:
        fcntl.ioctl(writing, FICLONE, reading)
    except OSError:
        return False
    return True


def _pass(reading: int, writing: int) -> str:
    """Read, hash and write block by block; returns the SHA-256. Some blocks may wait for the disk meanwhile."""
    state, offset = hashlib.sha256(), 0
    free, waiting = [_buffer() for _ in range(BUFFERS)], deque[tuple[Future[None], mmap.mmap]]()
    with ThreadPoolExecutor(1) as beside:
        while block := _next(reading, free[-1], state):
            waiting.append((beside.submit(_write, writing, block, offset), free.pop()))
            offset += len(block)
            while waiting and (not free or waiting[0][0].done()):
                written, buffer = waiting.popleft()
                written.result()
                free.append(buffer)
        for written, _ in waiting:
            written.result()
    return state.hexdigest()


def hash_flushed(path: Path) -> str:
    """Make a finished file read-only and seal it, then read it; returns its SHA-256 when it is on disk."""
    os.chmod(path, 0o444)
    with path.open("rb") as stream, ThreadPoolExecutor(1) as beside:
        seal(stream.fileno())
        flushed = beside.submit(os.fsync, stream.fileno())
        sha256 = sha256_file(path)
        flushed.result()
    return sha256


def _buffer() -> mmap.mmap:
    """Memory for a block, in large pages where the system has them: writing pins every page."""
    made = mmap.mmap(-1, BLOCK)
    with contextlib.suppress(OSError):
        made.madvise(mmap.MADV_HUGEPAGE)
    return made


def _create(target: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(target, flags | os.O_DIRECT, 0o644)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            target.unlink()
        return os.open(target, flags, 0o644)


def _next(descriptor: int, buffer: mmap.mmap, state: hashlib._Hash) -> memoryview:
    """Read until the buffer is full or the file ends, and hash what was read while it is in the processor's cache."""
    count, view = 0, memoryview(buffer)
    while got := os.readv(descriptor, [view[count : count + SLICE]]):
        state.update(view[count : count + got])
        count += got
    return view[:count]


def _write(descriptor: int, block: memoryview, offset: int) -> None:
    """Write all of it; an end that is no multiple of a disk's block goes through the page cache."""
    while block:
        if len(block) % ALIGNED or offset % ALIGNED:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        done = os.pwrite(descriptor, block, offset)
        block, offset = block[done:], offset + done
