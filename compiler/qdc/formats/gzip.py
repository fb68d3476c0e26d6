"""A gzip stream, unpacked piece by piece (`packed` reads it by range). Standard library only."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from qdc.core.errors import QdcError

MAGIC = b"\x1f\x8b"
PIECE = 1 << 18
"""Bytes unpacked at a time."""


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
