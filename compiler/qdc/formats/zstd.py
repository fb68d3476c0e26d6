"""A zstd stream, unpacked block by block (`packed` reads it by range).

Frames and blocks are walked here, the numbers in them are the zstandard library's: a block unpacks to no more than
128 KiB, so that what one step gives is bounded, and the end of each frame is known. Format: RFC 8878.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qdc.core.errors import QdcError

MAGIC = 0xFD2FB528
WINDOW = 1 << 25
"""Bytes of history that a frame may ask for (`zstd --long=27` asks for more, registries' tools for less)."""
_FREE, _LEAST = 1 << 20, 256
"""Blocks that are taken whatever they hold, and the bytes that the average one must give beyond."""
_DICTIONARY = (0, 1, 2, 4)


class Unzstd:
    """One place in a zstd stream: `out` bytes came out of the `at` bytes read.

    Several frames, and those to be skipped, are allowed. Raises QdcError `bytes.zstd` on a damaged stream.
    """

    def __init__(self, source: Callable[[int], bytes | memoryview], what: str, at: int = 0, out: int = 0) -> None:
        """`source(at)`: some of the stored bytes from `at` on; none at the end."""
        self.source, self.what, self.at, self.out = source, what, at, out
        self._pending = bytearray()
        self._machine: Any = None
        self._checksum = False
        self._frame_start = (at, out)
        self._blocks = 0

    def copy(self) -> Unzstd:
        """The start of the frame that is read."""
        return Unzstd(self.source, self.what, *self._frame_start)

    def step(self) -> bytes:
        """The next unpacked bytes, none at the end."""
        while self._machine is not None or self._frame():
            chunk = self._block()
            if chunk:
                self.out += len(chunk)
                return chunk
        return b""

    def _frame(self) -> bool:
        """Begin the next frame; False at the end of the stream."""
        while True:
            start = self.at - len(self._pending)
            if not self._fill(4):
                if self._pending:
                    raise self.damaged("something is behind its end")
                return False
            magic = int.from_bytes(self._pending[:4], "little")
            if magic == MAGIC:
                self._frame_start = (start, self.out)
                return self._head()
            if magic & 0xFFFFFFF0 != 0x184D2A50:
                raise self.damaged("a frame begins with other bytes than frames do")
            self._count()
            self._skip(int.from_bytes(self._need(8)[4:], "little"))

    def _head(self) -> bool:
        try:
            import zstandard
        except ImportError:
            text = f"{self.what}: zstd data is read by the package zstandard, which is not installed"
            raise QdcError("bytes.zstd", text, hint="pip install zstandard", exit_code=4) from None
        flags = self._need(5, keep=True)[4]
        single, dictionary, sizes = flags & 0x20, _DICTIONARY[flags & 3], (1 if flags & 0x20 else 0, 2, 4, 8)
        length = 5 + (0 if single else 1) + dictionary + sizes[flags >> 6]
        head = self._need(length)
        if any(head[length - sizes[flags >> 6] - dictionary : length - sizes[flags >> 6]]):
            raise self.damaged("it needs a dictionary")
        if single:
            said = int.from_bytes(head[length - sizes[flags >> 6] :], "little")
            window = said + (256 if flags >> 6 == 1 else 0)
        else:
            base = 1 << (10 + (head[5] >> 3))
            window = base + (base >> 3) * (head[5] & 7)
        if window > WINDOW:
            text = f"{self.what}: zstd data with a window of {window} bytes is not read; the most is {WINDOW}"
            raise QdcError("bytes.zstd", text, exit_code=4)
        self._machine = zstandard.ZstdDecompressor(max_window_size=WINDOW).decompressobj()
        self._checksum = bool(flags & 4)
        self._feed(head)
        return True

    def _block(self) -> bytes:
        """The next block of the frame, which ends it if it is its last."""
        head = self._need(3)
        value = int.from_bytes(head, "little")
        last, kind, size = value & 1, value >> 1 & 3, value >> 3
        if kind == 3 or size > 1 << 17:
            raise self.damaged("a block of no known kind or size")
        self._count()
        data = head + self._need(1 if kind == 1 else size)
        chunk = self._feed(data + (self._need(4) if last and self._checksum else b""))
        if last:
            if not self._machine.eof:
                raise self.damaged("a frame goes on behind its last block")
            self._machine = None
        return chunk

    def _feed(self, data: bytes) -> bytes:
        import zstandard

        try:
            return bytes(self._machine.decompress(data))
        except zstandard.ZstdError as error:
            raise self.damaged(str(error)) from error

    def _count(self) -> None:
        self._blocks += 1
        if self._blocks > _FREE and self.out < self._blocks * _LEAST:
            raise self.damaged(f"{self._blocks} blocks that hold next to nothing")

    def _fill(self, length: int) -> bool:
        while len(self._pending) < length:
            data = self.source(self.at)
            if not len(data):
                return False
            self.at += len(data)
            self._pending += data
        return True

    def _need(self, length: int, keep: bool = False) -> bytes:
        if not self._fill(length):
            raise self.damaged("the stream ends early")
        data = bytes(self._pending[:length])
        if not keep:
            del self._pending[:length]
        return data

    def _skip(self, length: int) -> None:
        while length > 0:
            if not self._fill(1):
                raise self.damaged("the stream ends early")
            part = min(length, len(self._pending))
            del self._pending[:part]
            length -= part

    def damaged(self, why: str) -> QdcError:
        return QdcError("bytes.zstd", f"{self.what}: damaged zstd data ({why})", exit_code=4)
