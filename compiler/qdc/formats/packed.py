"""The unpacked bytes of a compressed stream (gzip, zstd), by range, without a temporary file.

What is unpacked for the first time is counted against an `Allowance`, so that a small file cannot keep a reader busy
for long. The library for zstd is imported where such a stream is met, and nowhere else.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from qdc.formats import gzip
from qdc.formats.ranges import Allowance, RangeReader, SubRange, truncated

GZIP, ZSTD = "gzip", "zstd"
_INPUT = 1 << 16
_PADDING = 1 << 14
"""More than the zeros that end a tar: two blocks, padded to a record of 20."""
_SPACING = 16 * gzip.PIECE
_REMEMBERED = 1 << 16
"""Bytes of answers that are kept for each place that may be kept."""
Source = Callable[[int], bytes | memoryview]


class Unpacker(Protocol):
    """One place in a packed stream: `out` bytes came out of the `at` bytes read."""

    out: int
    at: int

    def step(self) -> bytes:
        """The next unpacked bytes, none at the end. Raises QdcError `bytes.*` on a damaged stream."""

    def copy(self) -> Unpacker:
        """A place to go on from: the same, or one before it."""


def packing(start: bytes) -> str | None:
    """`gzip` or `zstd`, by the first four bytes of a stream; None if it is neither."""
    if start.startswith(gzip.MAGIC):
        return GZIP
    known = start[:4] == b"\x28\xb5\x2f\xfd" or (start[1:4] == b"\x2a\x4d\x18" and 0x50 <= start[0] <= 0x5F)
    return ZSTD if known else None


def unpacker(kind: str, source: Source, what: str) -> Unpacker:
    """`source(at)`: some of the stored bytes from `at` on; none at the end. `what`: how errors name the stream."""
    if kind == GZIP:
        return gzip.Inflater(source, what)
    from qdc.formats.zstd import Unzstd

    return Unzstd(source, what)


def unpack(kind: str, stored: Iterator[bytes | memoryview], what: str, allowance: Allowance) -> Iterator[bytes]:
    """The unpacked bytes of a stream that cannot be read again."""
    place = unpacker(kind, lambda at: next((part for part in stored if len(part)), b""), what)
    while chunk := place.step():
        allowance.spend(len(chunk), what)
        yield chunk


def only_forward(source: RangeReader) -> bool:
    """Whether going back in `source` means to unpack it anew from far before."""
    while isinstance(source, SubRange):
        source = source.inner
    return isinstance(source, PackedRange) and source.kind == ZSTD


class PackedRange:
    """A packed stream by range. `size` is known after one pass.

    Reading on is free of repetition. Reading backwards costs at most the distance between two of up to `checkpoints`
    places that are kept: anywhere in gzip (45 kB each), in zstd where a frame begins. Of zstd the answers are
    remembered, too (64 kB for each place), and of all streams that share an allowance only one keeps its decompressor.
    """

    def __init__(
        self,
        inner: RangeReader,
        kind: str = GZIP,
        what: str = "packed",
        allowance: Allowance | None = None,
        checkpoints: int = 64,
    ) -> None:
        self.inner, self.kind, self.what, self.checkpoints = inner, kind, what, max(4, checkpoints)
        self.allowance = allowance if allowance is not None else Allowance(inner.size)
        self.trailer = self.trusted = False
        self.watch: Callable[[bytes], None] | None = None
        self._watched = 0
        self._spacing = _SPACING
        self._live = self._first()
        self._states: list[Unpacker] = []
        self._window, self._seen = b"", 0
        self._size: int | None = None
        self._answers: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._left = self.checkpoints * _REMEMBERED if kind == ZSTD else 0

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
        found = self._answers.get((offset, length))
        if found is None:
            found = self._fetch(offset, length)
            self._remember((offset, length), found)
        return found

    def _fetch(self, offset: int, length: int) -> bytes:
        parts = []
        while length > 0:
            start = self._live.out - len(self._window)
            if start <= offset < self._live.out:
                part = self._window[offset - start : offset - start + length]
                parts.append(part)
                offset, length = offset + len(part), length - len(part)
                continue
            best = self._before(offset)
            if offset < start or (best is not None and best.out > self._live.out):
                self._live, self._window = self._again(best), b""
            if not self._step():
                break
        return b"".join(parts)

    def ends_after(self, offset: int) -> bool:
        """Whether the stream's own trailer says so, where only parts are to be read (`trailer`): it gives the size

        modulo 4 GiB of the last member, which is the only one unless the stream is made to deceive.
        """
        if self.kind != GZIP or not self.trailer or self.inner.size < 18:
            return False
        (said,) = struct.unpack("<I", self.inner.read(self.inner.size - 4, 4))
        unread = self.inner.size - self._live.at
        plausible = unread * 1032 >= offset - self._live.out
        self.trusted = self.trusted or (plausible and (said - offset) % (1 << 32) <= _PADDING)
        return plausible and (said - offset) % (1 << 32) <= _PADDING

    def stream(self) -> Iterator[bytes]:
        """All bytes in order; nothing else may read meanwhile. `watch` gets the stored bytes, each once."""
        self._live, self._window, self._watched = self._first(), b"", 0
        while self._step():
            yield self._window

    def rest(self) -> None:
        """Let the decompressor go; the next read starts one again."""
        self._live, self._window = self._first(), b""

    def _first(self) -> Unpacker:
        return unpacker(self.kind, self._stored, self.what)

    def _again(self, place: Unpacker | None) -> Unpacker:
        return place.copy() if place is not None else self._first()

    def _before(self, offset: int) -> Unpacker | None:
        """The last place kept that is not behind `offset`."""
        return max((place for place in self._states if place.out <= offset), key=lambda place: place.out, default=None)

    def _remember(self, key: tuple[int, int], data: bytes) -> None:
        if len(data) > self._left + sum(map(len, self._answers.values())):
            return
        self._answers[key] = data
        self._left -= len(data)
        while self._left < 0:
            self._left += len(self._answers.popitem(last=False)[1])

    def _step(self) -> bool:
        if self.kind == ZSTD:
            self.allowance.turn(self)
        chunk = self._live.step()
        if not chunk:
            self._size = self._live.out
            return False
        self._window = chunk
        if self._live.out > self._seen:
            self.allowance.spend(self._live.out - self._seen, self.what)
            self._seen = self._live.out
        if self._live.out >= (self._states[-1].out if self._states else 0) + self._spacing:
            place = self._live.copy()
            if place.out > (self._states[-1].out if self._states else 0):
                self._states.append(place)
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
