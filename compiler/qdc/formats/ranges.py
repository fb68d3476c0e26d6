"""Bytes that can be read by range: a file, a part of another range, memory; and their digests.

Readers of tars, images and safetensors take a `RangeReader`, so that they neither know nor care whether the
bytes lie in a file, inside a tar inside a file, behind compression (`gzip`) or behind a network. Nothing here
writes. Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from qdc.core.errors import QdcError

CHUNK = 1 << 20
SMALL = 1 << 15
"""Bytes below which a thread costs more than hashing."""


class RangeReader(Protocol):
    """`size` in bytes; `read` gives exactly `length` bytes, or raises QdcError `bytes.truncated`."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes: ...


@runtime_checkable
class Short(Protocol):
    """A range whose end is not known before it is reached: `fetch` gives what there is, `size` is known then."""

    def fetch(self, offset: int, length: int) -> bytes: ...

    def ends_after(self, offset: int) -> bool:
        """Whether nothing but padding follows `offset`, as far as that shows without reading on."""


@runtime_checkable
class Streamed(Protocol):
    """A range that is read best from its start to its end."""

    def stream(self) -> Iterator[bytes]: ...


def truncated(what: str, offset: int, length: int, size: int) -> QdcError:
    """The error for a range that is not there."""
    return QdcError("bytes.truncated", f"{what}: wanted {length} bytes at {offset}, but it has {size}", exit_code=4)


class BytesRange:
    """Bytes in memory."""

    def __init__(self, data: bytes, what: str = "memory") -> None:
        self.data, self.what = data, what

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > len(self.data):
            raise truncated(self.what, offset, length, len(self.data))
        return self.data[offset : offset + length]


class FileRange:
    """A file on disk, opened once and read by position (safe for several threads)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise QdcError("bytes.open", f"cannot open: {error.strerror}", file=path, exit_code=4) from error
        self._size = os.fstat(self._descriptor).st_size

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > self._size:
            raise truncated(self.path.name, offset, length, self._size)
        parts, at = [], offset
        while at < offset + length:
            try:
                part = os.pread(self._descriptor, offset + length - at, at)
            except OSError as error:
                raise QdcError("bytes.read", f"{error.strerror}", file=self.path, exit_code=4) from error
            if not part:
                raise truncated(self.path.name, at, offset + length - at, self._size)
            parts.append(part)
            at += len(part)
        return b"".join(parts)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close() if hasattr(self, "_descriptor") else None


class SubRange:
    """`size` bytes of another range, from `start`; that they are there shows when they are read."""

    def __init__(self, inner: RangeReader, start: int, size: int, what: str = "part") -> None:
        if start < 0 or size < 0:
            raise truncated(what, start, size, 0)
        self.inner, self.start, self._size, self.what = inner, start, size, what

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > self._size:
            raise truncated(self.what, offset, length, self._size)
        return self.inner.read(self.start + offset, length)


class Resting(Protocol):
    """What can let its memory go while others are read."""

    def rest(self) -> None: ...


class Allowance:
    """How many bytes may still be unpacked: `FREE`, and `RATIO` for each byte that is stored.

    Real data shrinks to no less than a twentieth; what unpacks to more than a hundredfold is made to exhaust readers.
    """

    FREE, RATIO = 4 << 30, 100

    def __init__(self, stored: int) -> None:
        self.left = self.FREE + self.RATIO * stored
        self._unpacks: Resting | None = None

    def turn(self, reader: Resting) -> None:
        """`reader` is to unpack; the one that did so before lets its memory go."""
        if self._unpacks is not None and self._unpacks is not reader:
            self._unpacks.rest()
        self._unpacks = reader

    def spend(self, amount: int, what: str) -> None:
        """Raises QdcError `bytes.bomb` when nothing is left."""
        self.left -= amount
        if self.left < 0:
            why = f"{what}: unpacks to more than {self.RATIO} times what is stored; it is not read on"
            raise QdcError("bytes.bomb", why, exit_code=4)


class Hashing:
    """SHA-256 in a thread of its own, so that bytes are hashed while the next ones are read.

    A context; `take(state, chunk)` in order, and `state` is asked after the context's end. Little is hashed at once.
    """

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[Any, Any] | None] = queue.Queue(maxsize=8)
        self._thread: threading.Thread | None = None
        self._taken = 0

    def __enter__(self) -> Hashing:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            item[0].update(item[1])

    def take(self, state: Any, chunk: bytes | memoryview) -> None:
        self._taken += len(chunk)
        if self._taken < CHUNK:
            state.update(chunk)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        self._queue.put((state, chunk))


def fetcher(source: RangeReader) -> Callable[[int, int], bytes]:
    """`fetch(offset, length)`: up to `length` bytes, fewer only where `source` ends."""
    if isinstance(source, Short):
        return source.fetch

    def bounded(offset: int, length: int) -> bytes:
        return source.read(offset, min(length, source.size - offset)) if offset < source.size else b""

    return bounded


def place(source: RangeReader) -> Hashable:
    """Equal for two readers of the same bytes of the same file; for other readers, only for the same object."""
    if isinstance(source, SubRange):
        return (place(source.inner), source.start, source.size)
    return str(source.path) if isinstance(source, FileRange) else id(source)


def chunks(source: RangeReader, size: int = CHUNK) -> Iterator[bytes]:
    """All bytes of `source` in order."""
    if isinstance(source, Streamed):
        yield from source.stream()
        return
    for offset in range(0, source.size, size):
        yield source.read(offset, min(size, source.size - offset))


def sha256(source: RangeReader) -> str:
    """SHA-256 (64 hex) of all bytes of `source`."""
    if not isinstance(source, Streamed) and source.size <= CHUNK:
        return hashlib.sha256(source.read(0, source.size)).hexdigest()
    return digests(source, {})[0]


def digests(source: RangeReader, parts: Mapping[str, tuple[int, int]]) -> tuple[str, dict[str, str]]:
    """SHA-256 of the whole and of named parts (name -> offset, size), in one pass over the bytes.

    Parts may overlap; equal ones are hashed once. A part that reaches beyond the end raises QdcError
    `bytes.truncated`.
    """
    whole = hashlib.sha256()
    waiting = sorted(set(parts.values()), reverse=True)
    active: dict[tuple[int, int], Any] = {}
    states: dict[tuple[int, int], Any] = {}
    at = 0
    with Hashing() as all_, Hashing() as some:
        for chunk in chunks(source):
            all_.take(whole, chunk)
            end = at + len(chunk)
            while waiting and waiting[-1][0] < end:
                part = waiting.pop()
                active[part] = states[part] = hashlib.sha256()
            for (start, size), state in list(active.items()):
                piece = memoryview(chunk)[max(0, start - at) : max(0, min(start + size, end) - at)]
                if len(piece) < SMALL and start >= at and start + size <= end:
                    state.update(piece)
                else:
                    some.take(state, piece)
                if start + size <= end:
                    del active[start, size]
            at = end
    for part in waiting:
        states[part] = hashlib.sha256()
    for name, (offset, size) in parts.items():
        if offset + size > at:
            raise truncated(name, offset, size, at)
    return whole.hexdigest(), {name: states[part].hexdigest() for name, part in parts.items()}
