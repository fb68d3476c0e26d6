"""All that one pass over a stream can tell of a tar: its members, its digest, those of some files, some small files.

For bytes that are dear to read twice: compressed layers, compressed archives, and what an engine sends. The bytes are
hashed in threads while the next ones are unpacked. Standard library only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from qdc.core.errors import QdcError
from qdc.formats import tar
from qdc.formats.packed import packing, unpack
from qdc.formats.ranges import SMALL, Allowance, Hashing

KEEP_ONE, KEEP_ALL = 1 << 20, 32 << 20
"""Bytes of a small file, and of all that are kept."""
JSON_ALL = 64 << 20
"""Bytes of an archive's own documents that are kept."""


@dataclass(frozen=True)
class Wanted:
    """What a pass looks out for: files (by path) to hash, and small files whose bytes will be asked for."""

    hashed: Callable[[str], bool]
    kept: Callable[[str], bool]


@dataclass
class Survey:
    """`digest`: SHA-256 (hex) of all bytes, and `size`, None where they cannot all be read; `error`: what stopped the

    reading of members; `files`: offset of a file's data -> its SHA-256; `kept`: offset -> bytes.
    """

    members: list[tar.Member] = field(default_factory=list)
    error: QdcError | None = None
    size: int | None = None
    digest: str | None = None
    files: dict[int, str] = field(default_factory=dict)
    kept: dict[int, bytes] = field(default_factory=dict)


class Pool:
    """What all surveys of an image share: room for members and for kept bytes, and what may be unpacked."""

    def __init__(self, wanted: Wanted, allowance: Allowance) -> None:
        self.wanted, self.allowance = wanted, allowance
        self.room, self.keep = tar.Room(), KEEP_ALL


class Forward:
    """A stream that is read on, never back (`ranges.Short`); `taps` get every chunk once."""

    def __init__(self, chunks: Iterator[bytes | memoryview]) -> None:
        self._chunks, self._start, self._window = chunks, 0, memoryview(b"")
        self._error: QdcError | None = None
        self.taps: list[Callable[[memoryview], None]] = []

    @property
    def size(self) -> int:
        """What has come so far; all, at the end."""
        return self._start + len(self._window)

    def fetch(self, offset: int, length: int) -> bytes:
        return b"".join(self.part(offset, length))

    def read(self, offset: int, length: int) -> bytes:
        return self.fetch(offset, length)

    def ends_after(self, offset: int) -> bool:
        return False

    def part(self, offset: int, length: int) -> Iterator[memoryview]:
        """The pieces of `length` bytes from `offset`; fewer at the end."""
        assert offset >= self._start
        while length > 0:
            at = offset - self._start
            if at < len(self._window):
                piece = self._window[at : at + length]
                offset, length = offset + len(piece), length - len(piece)
                yield piece
            elif not self._advance():
                return

    def drain(self) -> None:
        while self._advance():
            pass

    def _advance(self) -> bool:
        if self._error is not None:
            raise self._error
        try:
            chunk = next(self._chunks, b"")
        except QdcError as error:
            self._error = error
            raise
        if not len(chunk):
            return False
        self._start += len(self._window)
        self._window = memoryview(chunk)
        for tap in self.taps:
            tap(self._window)
        return True


def survey(chunks: Iterator[bytes | memoryview], what: str, pool: Pool) -> Survey:
    """One pass over a tar. Whatever the bytes are, it answers; a fault is its `error`."""
    found, whole = Survey(), hashlib.sha256()
    forward = Forward(chunks)
    with Hashing() as all_, Hashing() as some:
        forward.taps.append(lambda chunk: all_.take(whole, chunk))
        states = {}
        try:
            try:
                for member in tar.walk(forward, what, pool.room):
                    found.members.append(member)
                    if member.type == "file" and member.size:
                        state = _look(forward, member, pool, found, some)
                        if state is not None:
                            states[member.offset] = state
            except QdcError as error:
                found.error = error
                if not error.id.startswith("tar."):
                    raise
            forward.drain()
            found.size = forward.size
        except QdcError as error:
            found.error = found.error or error
    if found.size is not None:
        found.digest = whole.hexdigest()
        found.files = {
            member.offset: states[member.offset].hexdigest()
            for member in found.members
            if member.offset in states and member.offset + member.size <= found.size
        }
    return found


def _look(forward: Forward, member: tar.Member, pool: Pool, found: Survey, some: Hashing) -> Any:
    """Hash and keep what is wanted of one file while it passes; its state if it is hashed."""
    hashed = pool.wanted.hashed(member.path)
    if member.size <= min(KEEP_ONE, pool.keep) and pool.wanted.kept(member.path):
        data = forward.fetch(member.offset, member.size)
        if len(data) == member.size:
            found.kept[member.offset] = data
            pool.keep -= len(data)
        return hashlib.sha256(data) if hashed else None
    if not hashed:
        return None
    state = hashlib.sha256()
    for piece in forward.part(member.offset, member.size):
        if member.size < SMALL:
            state.update(piece)
        else:
            some.take(state, piece)
    return state


@dataclass
class Archived:
    """One pass over an archive: its own members and documents, and by the offset of a layer in it: the SHA-256 of the

    stored bytes (None where they did not all come), and the survey of what they hold.
    """

    outer: Survey = field(default_factory=Survey)
    layers: dict[int, tuple[str | None, Survey]] = field(default_factory=dict)


def archive(chunks: Iterator[bytes | memoryview], what: str, pool: Pool) -> Archived:
    """Whatever the bytes are, it answers; a fault is the `error` of the part that has it."""
    found, left = Archived(), JSON_ALL
    forward = Forward(chunks)
    try:
        for member in tar.walk(forward, what, tar.Room()):
            found.outer.members.append(member)
            if member.type != "file":
                continue
            start = forward.fetch(member.offset, min(member.size, tar.BLOCK))
            if packing(start) or start[257:262] == b"ustar":
                found.layers[member.offset] = _layer(forward, member, start, pool)
            elif member.size <= left:
                data = start + forward.fetch(member.offset + len(start), member.size - len(start))
                if len(data) == member.size:
                    found.outer.kept[member.offset] = data
                    left -= len(data)
        forward.drain()
    except QdcError as error:
        found.outer.error = error
    return found


def _layer(forward: Forward, member: tar.Member, start: bytes, pool: Pool) -> tuple[str | None, Survey]:
    stored, size = hashlib.sha256(), 0
    with Hashing() as hashing:

        def passing() -> Iterator[bytes | memoryview]:
            nonlocal size
            rest = forward.part(member.offset + len(start), member.size - len(start))
            parts: Iterator[bytes | memoryview] = chain((start,), rest)
            for piece in parts:
                size += len(piece)
                hashing.take(stored, piece)
                yield piece

        pieces = passing()
        kind = packing(start)
        found = survey(unpack(kind, pieces, member.path, pool.allowance) if kind else pieces, member.path, pool)
        for _ in pieces:
            pass
    return (stored.hexdigest() if size == member.size else None), found
