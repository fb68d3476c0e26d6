"""Bytes that can be read by range: a file, a part of another range, memory, a gzip stream.

Readers of tars, images and safetensors take a `RangeReader`, so that they neither know nor care whether the
bytes lie in a file, inside a tar inside a file, or behind compression. Nothing here writes.
Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, Protocol

from qdc.core.errors import QdcError

CHUNK = 1 << 20


class RangeReader(Protocol):
    """`size` in bytes; `read` gives exactly `length` bytes, or raises QdcError `bytes.truncated`."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes: ...


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
    """`size` bytes of another range, from `start`."""

    def __init__(self, inner: RangeReader, start: int, size: int, what: str = "part") -> None:
        if start < 0 or size < 0 or start + size > inner.size:
            raise truncated(what, start, size, inner.size)
        self.inner, self.start, self._size, self.what = inner, start, size, what

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > self._size:
            raise truncated(self.what, offset, length, self._size)
        return self.inner.read(self.start + offset, length)


class GzipRange:
    """The decompressed bytes of a gzip stream (several members allowed), by range, without a temporary file.

    Keeps up to `CHECKPOINTS` copies of the decompressor, so that reading backwards costs at most the distance
    between two of them. `size` is known after one pass. Raises QdcError `bytes.gzip` on a damaged stream.
    """

    CHECKPOINTS = 64

    def __init__(self, inner: RangeReader, what: str = "gzip") -> None:
        self.inner, self.what = inner, what
        self._spacing = 4 * CHUNK
        self._states: list[tuple[int, int, bytes, Any]] = [(0, 0, b"", zlib.decompressobj(wbits=31))]
        self._size: int | None = None

    @property
    def size(self) -> int:
        if self._size is None:
            for _ in self._stream(0):
                pass
        assert self._size is not None
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0:
            raise truncated(self.what, offset, length, self.size)
        if length == 0:
            return b""
        parts, wanted = [], length
        for chunk in self._stream(offset):
            parts.append(chunk[:wanted])
            wanted -= len(parts[-1])
            if wanted == 0:
                return b"".join(parts)
        raise truncated(self.what, offset, length, self.size)

    def _stream(self, offset: int) -> Iterator[bytes]:
        """Decompressed chunks from `offset` to the end."""
        out, at, pending, machine = max(
            (state for state in self._states if state[0] <= offset), key=lambda state: state[0]
        )
        machine = machine.copy()
        while True:
            if not pending:
                length = min(1 << 16, self.inner.size - at)
                pending = self.inner.read(at, length)
                at += length
                if not pending and not machine.eof:
                    raise self._damaged("the stream ends early")
            try:
                chunk = machine.decompress(pending, CHUNK)
            except zlib.error as error:
                raise self._damaged(str(error)) from error
            pending = machine.unconsumed_tail
            if chunk:
                end = out + len(chunk)
                if end > offset:
                    yield chunk[max(0, offset - out) :]
                out = end
            if machine.eof:
                pending = machine.unused_data.lstrip(b"\0")
                while not pending and at < self.inner.size:
                    length = min(1 << 16, self.inner.size - at)
                    pending, at = self.inner.read(at, length).lstrip(b"\0"), at + length
                if not pending:
                    self._size = out
                    return
                machine = zlib.decompressobj(wbits=31)
            elif out >= self._states[-1][0] + self._spacing:
                self._checkpoint(out, at, pending, machine.copy())

    def _checkpoint(self, out: int, at: int, pending: bytes, machine: Any) -> None:
        self._states.append((out, at, pending, machine))
        if len(self._states) > self.CHECKPOINTS:
            self._states = self._states[::2]
            self._spacing *= 2

    def _damaged(self, why: str) -> QdcError:
        return QdcError("bytes.gzip", f"{self.what}: damaged gzip data ({why})", exit_code=4)


def place(source: RangeReader) -> Hashable:
    """Equal for two readers of the same bytes of the same file; for other readers, only for the same object."""
    if isinstance(source, SubRange):
        return (place(source.inner), source.start, source.size)
    return str(source.path) if isinstance(source, FileRange) else id(source)


def chunks(source: RangeReader, size: int = CHUNK) -> Iterator[bytes]:
    """All bytes of `source` in order."""
    if isinstance(source, GzipRange):
        yield from source._stream(0)
        return
    for offset in range(0, source.size, size):
        yield source.read(offset, min(size, source.size - offset))


def sha256(source: RangeReader) -> str:
    """SHA-256 (64 hex) of all bytes of `source`."""
    state = hashlib.sha256()
    for chunk in chunks(source):
        state.update(chunk)
    return state.hexdigest()


def digests(source: RangeReader, parts: dict[str, tuple[int, int]]) -> tuple[str, dict[str, str]]:
    """SHA-256 of the whole and of named parts (name -> offset, size), in one pass over the bytes.

    Parts may overlap; a part that reaches beyond the end raises QdcError `bytes.truncated`.
    """
    whole = hashlib.sha256()
    waiting = sorted(parts.items(), key=lambda item: item[1], reverse=True)
    active: dict[str, tuple[int, Any]] = {}
    done: dict[str, str] = {}
    at = 0
    for chunk in chunks(source):
        whole.update(chunk)
        end = at + len(chunk)
        while waiting and waiting[-1][1][0] < end:
            name, (offset, size) = waiting.pop()
            active[name] = (offset + size, hashlib.sha256())
        for name, (stop, state) in list(active.items()):
            start = parts[name][0]
            state.update(memoryview(chunk)[max(0, start - at) : max(0, min(stop, end) - at)])
            if stop <= end:
                done[name] = state.hexdigest()
                del active[name]
        at = end
    for name, (offset, size) in waiting:
        if size == 0 and offset <= at:
            done[name] = hashlib.sha256().hexdigest()
        else:
            raise truncated(name, offset, size, at)
    if active:
        name = next(iter(active))
        raise truncated(name, *parts[name], at)
    return whole.hexdigest(), done
