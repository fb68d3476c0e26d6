"""The decompressed bytes of a gzip stream, by range, without a temporary file. Standard library only.

What is unpacked for the first time is counted against an `Allowance`, so that a small file cannot keep a reader busy
for long.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from qdc.core.errors import QdcError
from qdc.formats.ranges import Allowance, RangeReader, truncated

MAGIC = b"\x1f\x8b"
PIECE = 1 << 18
"""Bytes unpacked at a time."""
_INPUT = 1 << 16
_PADDING = 1 << 14
"""More than the zeros that end a tar: two blocks, padded to a record of 20."""


class Inflater:
    """One place in a gzip stream (several members allowed): `out` bytes came out of the `at` bytes read.

    Raises QdcError `bytes.gzip` on a damaged stream.
    """

    def __init__(self, source: Callable[[int], bytes | memoryview], what: str) -> None:
        """`source(at)`: some of the stored bytes from `at` on; none at the end."""
        self.source, self.what = source, what
        self.out = self.at = 0
        self.pending: bytes | memoryview = b""
        self.machine: Any = zlib.decompressobj(wbits=31)

    def copy(self) -> Inflater:
        """The same place; what was read and not used yet is read again."""
        twin = Inflater.__new__(Inflater)
        twin.__dict__.update(self.__dict__)
        twin.machine, twin.at, twin.pending = self.machine.copy(), self.at - len(self.pending), b""
        return twin

    def step(self) -> bytes:
        """The next decompressed bytes, none at the end."""
        while True:
            if self.machine.eof and not self._another():
                return b""
            if not self.pending and not self._feed():
                raise self.damaged("the stream ends early")
            try:
                chunk = self.machine.decompress(self.pending, PIECE)
            except zlib.error as error:
                raise self.damaged(str(error)) from error
            self.pending = self.machine.unused_data if self.machine.eof else self.machine.unconsumed_tail
            if chunk:
                self.out += len(chunk)
                return bytes(chunk)

    def _feed(self) -> bool:
        self.pending = self.source(self.at)
        self.at += len(self.pending)
        return bool(self.pending)

    def _another(self) -> bool:
        """Whether a further member follows; zeros after the last one are padding."""
        while True:
            self.pending = bytes(self.pending).lstrip(b"\0")
            if self.pending:
                self.machine = zlib.decompressobj(wbits=31)
                return True
            if not self._feed():
                return False

    def damaged(self, why: str) -> QdcError:
        return QdcError("bytes.gzip", f"{self.what}: damaged gzip data ({why})", exit_code=4)


def inflate(stored: Iterator[bytes | memoryview], what: str, allowance: Allowance) -> Iterator[bytes]:
    """The decompressed bytes of a stream that cannot be read again."""
    inflater = Inflater(lambda at: next((part for part in stored if len(part)), b""), what)
    while chunk := inflater.step():
        allowance.spend(len(chunk), what)
        yield chunk


class GzipRange:
    """A gzip stream by range.

    Reading on is free of repetition; reading backwards costs at most the distance between two of up to
    `checkpoints` copies of the decompressor (45 kB each). `size` is known after one pass.
    """

    def __init__(
        self, inner: RangeReader, what: str = "gzip", allowance: Allowance | None = None, checkpoints: int = 64
    ) -> None:
        self.inner, self.what, self.allowance, self.checkpoints = inner, what, allowance, max(4, checkpoints)
        self.trailer = self.trusted = False
        self.watch: Callable[[bytes], None] | None = None
        self._watched = 0
        self._spacing = 16 * PIECE
        self._live = Inflater(self._stored, what)
        self._states = [self._live.copy()]
        self._window, self._seen = b"", 0
        self._size: int | None = None

    @property
    def size(self) -> int:
        while self._size is None:
            self._step()
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        data = self.fetch(offset, length) if offset >= 0 and length >= 0 else b""
        if len(data) != length or offset < 0:
            raise truncated(self.what, offset, length, self.size)
        return data

    def fetch(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes; fewer only at the end."""
        parts = []
        while length > 0:
            start = self._live.out - len(self._window)
            if start <= offset < self._live.out:
                part = self._window[offset - start : offset - start + length]
                parts.append(part)
                offset, length = offset + len(part), length - len(part)
                continue
            best = max((state for state in self._states if state.out <= offset), key=lambda state: state.out)
            if offset < start or best.out > self._live.out:
                self._live, self._window = best.copy(), b""
            if not self._step():
                break
        return b"".join(parts)

    def ends_after(self, offset: int) -> bool:
        """Whether the stream's own trailer says so, where only parts are to be read (`trailer`): it gives the size

        modulo 4 GiB of the last member, which is the only one unless the stream is made to deceive.
        """
        if not self.trailer or self.inner.size < 18:
            return False
        (said,) = struct.unpack("<I", self.inner.read(self.inner.size - 4, 4))
        unread = self.inner.size - self._live.at
        plausible = unread * 1032 >= offset - self._live.out
        self.trusted = self.trusted or (plausible and (said - offset) % (1 << 32) <= _PADDING)
        return plausible and (said - offset) % (1 << 32) <= _PADDING

    def stream(self) -> Iterator[bytes]:
        """All bytes in order; nothing else may read meanwhile. `watch` gets the stored bytes, each once."""
        self._live, self._window, self._watched = self._states[0].copy(), b"", 0
        while self._step():
            yield self._window

    def _step(self) -> bool:
        chunk = self._live.step()
        if not chunk:
            self._size = self._live.out
            return False
        self._window = chunk
        if self._live.out > self._seen:
            if self.allowance is not None:
                self.allowance.spend(self._live.out - self._seen, self.what)
            self._seen = self._live.out
        if self._live.out >= self._states[-1].out + self._spacing:
            self._states.append(self._live.copy())
            if len(self._states) > self.checkpoints:
                self._states = self._states[::2]
                self._spacing *= 2
        return True

    def _stored(self, at: int) -> bytes:
        data = self.inner.read(at, min(_INPUT, self.inner.size - at))
        if self.watch is not None and at == self._watched:
            self._watched += len(data)
            self.watch(data)
        return data
