"""For which GPUs a library holds code: the fat binaries in `.so` files, bare cubins, and PTX.

Reads headers only: of a library of gigabytes, its section table and some bytes a kernel image; compressed code still
names its architecture. Checked against NVIDIA's cuobjdump (`tests/cuda`). Nothing is unpacked or run.
Standard library only.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from qdc.core.errors import COULD_NOT, QdcError
from qdc.formats import elf
from qdc.formats.ranges import RangeReader

MAGIC = struct.pack("<I", 0xBA55ED50)
LINKED, RELOCATABLE = ".nv_fatbin", "__nv_relfatbin"
"""Sections of code that runs, and of the pieces that it was linked from."""
MAX_ENTRIES = 200_000
Kind = Literal["cubin", "ptx"]
Grade = Literal["native", "jit", "none"]
_KINDS: dict[int, Kind] = {1: "ptx", 2: "cubin"}
_CONTAINER, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ8xIIQQ")
_BLOCK = 1 << 16
_TARGET = re.compile(rb"^[ \t]*\.target[ \t]+sm_(\d{2,3})([af]?)", re.MULTILINE)


@dataclass(frozen=True, order=True)
class Code:
    """Code for one architecture. `sm`: 86 is compute capability 8.6; `suffix`: `a` runs on exactly that one, `f` on
    its family."""

    sm: int
    kind: Kind
    suffix: str = ""

    @property
    def name(self) -> str:
        """`sm_90a` for a cubin, `compute_90a` for PTX."""
        return f"{'sm' if self.kind == 'cubin' else 'compute'}_{self.sm}{self.suffix}"

    def runs_on(self, card: tuple[int, int]) -> bool:
        """Whether a card of that compute capability can run it, by NVIDIA's compatibility rules.

        A cubin runs on the same major and a minor that is not lower; PTX is compiled for any later capability.
        """
        own = divmod(self.sm, 10)
        if self.suffix == "a":
            return card == own
        if self.kind == "cubin" or self.suffix == "f":
            return card[0] == own[0] and card[1] >= own[1]
        return card >= own


Images = Counter[frozenset[Code]]
"""Sets of code that stand for one another (a fat binary: the engine takes the best of them) -> how many there are."""


def grade(codes: Iterable[Code], card: tuple[int, int]) -> Grade:
    """`native` (a cubin runs), `jit` (only PTX does), or `none`."""
    kinds = {code.kind for code in codes if code.runs_on(card)}
    return "native" if "cubin" in kinds else "jit" if kinds else "none"


def read_images(reader: RangeReader, what: str) -> Images:
    """All code in a library, a cubin, a fat binary or a PTX file; empty where there is none.

    Where a library holds linked code, the pieces that it was linked from count with their PTX alone: the driver is
    given them to link for a card that came later (`crt/link.stub` of CUDA), and their cubins do not run.
    Raises QdcError `elf.*` or `fatbin.*` on a malformed file.
    """
    found: Images = Counter()
    start = reader.read(0, min(4, reader.size))
    if start == MAGIC:
        _walk(reader, 0, reader.size, what, found)
        return found
    if start != elf.MAGIC:
        text = _TARGET.search(reader.read(0, min(_BLOCK, reader.size)))
        if text:
            found[frozenset([Code(int(text[1]), "ptx", text[2].decode())])] += 1
        return found
    frame = elf.read_elf(reader, what)
    assert frame is not None
    if frame.machine == elf.CUDA:
        found[frozenset([_cubin(reader, frame, what)])] += 1
    for section in frame.named(LINKED):
        _walk(reader, section.offset, section.size, what, found)
    if not found:
        for section in frame.named(RELOCATABLE):
            _walk(reader, section.offset, section.size, what, found)
        return found
    pieces: Images = Counter()
    for section in frame.named(RELOCATABLE):
        _walk(reader, section.offset, section.size, what, pieces)
    for image, count in pieces.items():
        ptx = frozenset(code for code in image if code.kind == "ptx")
        found[ptx] += count if ptx else 0
    return +found


def _cubin(reader: RangeReader, frame: elf.Elf, what: str) -> Code:
    """A bare cubin's architecture. ABI version 7 (CUDA 12 and before) has it in bits 0-7 of the flags, 8 in 8-15."""
    old = frame.abi_version <= 7
    sm = frame.flags & 0xFF if old else frame.flags >> 8 & 0xFF
    if sm < 10:
        raise _bad("cubin", f"{what}: its flags {frame.flags:#x} name no architecture")
    exact = bool(frame.flags & (0x800 if old else 0x8)) or _exact(reader, frame)
    return Code(sm, "cubin", "a" if exact else "")


def _exact(reader: RangeReader, frame: elf.Elf) -> bool:
    """Whether `.nv.compat` of a cubin has attribute 9 at 1: CUDA 13 marks code for one architecture there alone."""
    for section in frame.named(".nv.compat"):
        data, at = reader.read(section.offset, min(section.size, _BLOCK)), 0
        while at + 4 <= len(data):
            form, attribute, value = struct.unpack_from("<BBH", data, at)
            if attribute == 9 and form in (2, 3):
                return bool(value & 0xFF == 1)
            at += 4 + (value if form == 4 else 0)
    return False


def _walk(reader: RangeReader, start: int, size: int, what: str, found: Images) -> None:
    """Every fat binary in `size` bytes at `start`: each begins with MAGIC at a multiple of 8, after padding."""
    window = _Window(reader, start + size)
    at, end = start, start + size
    while (at := window.magic(at)) + _CONTAINER.size <= end:
        _, _, header, body = _CONTAINER.unpack(window.read(at, _CONTAINER.size))
        stop = at + header + body
        if header < _CONTAINER.size or stop > end:
            raise _bad("container", f"{what}: a fat binary at {at} ends after its section does")
        codes, entry = set(), at + header
        while entry + _ENTRY.size <= stop:
            kind, _, length, payload, _, sm, _, flags = _ENTRY.unpack(window.read(entry, _ENTRY.size))
            if length < _ENTRY.size or entry + length + payload > stop:
                raise _bad("entry", f"{what}: code at {entry} ends after its fat binary does")
            if kind in _KINDS and 10 <= sm <= 999:
                suffix = "a" if flags >> 20 & 1 else "f" if flags >> 21 & 1 else ""
                codes.add(Code(sm, _KINDS[kind], suffix))
            window.count(what)
            entry += length + payload
        found[frozenset(codes)] += 1
        window.count(what)
        at = stop + (start - stop) % 8


class _Window:
    """Short reads of rising offsets up to `end`, served from blocks; counts entries, which are bounded."""

    def __init__(self, reader: RangeReader, end: int) -> None:
        self.reader, self.end = reader, end
        self.start, self.block, self.entries = 0, b"", 0

    def read(self, offset: int, length: int) -> bytes:
        if not self.start <= offset <= offset + length <= self.start + len(self.block):
            self.start = offset
            self.block = self.reader.read(offset, min(_BLOCK, self.end - offset))
        return self.block[offset - self.start : offset - self.start + length]

    def magic(self, at: int) -> int:
        """The next offset from `at` in steps of 8 where MAGIC stands, or the end."""
        while at + len(MAGIC) <= self.end:
            if self.read(at, len(MAGIC)) == MAGIC:
                return at
            place = self.block.find(MAGIC, at + 1 - self.start)
            while place >= 0 and (self.start + place - at) % 8:
                place = self.block.find(MAGIC, place + 1)
            step = max(8, (len(self.block) - (at - self.start)) // 8 * 8 - 8)
            at = self.start + place if place >= 0 else at + step
        return self.end

    def count(self, what: str) -> None:
        self.entries += 1
        if self.entries > MAX_ENTRIES:
            raise _bad("entries", f"{what}: more than {MAX_ENTRIES} pieces of GPU code")


def _bad(id: str, message: str) -> QdcError:
    return QdcError(f"fatbin.{id}", message, exit_code=COULD_NOT)
