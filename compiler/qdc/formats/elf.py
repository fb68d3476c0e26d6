"""The frame of a 64-bit little-endian ELF file: its header and the places of its sections, by range.

Knows no section's content. Reads a few kilobytes of a file of any size. Standard library only.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from qdc.core.errors import COULD_NOT, QdcError
from qdc.formats.ranges import RangeReader

MAGIC = b"\x7fELF"
CUDA = 190
"""`machine` of GPU code."""
MAX_SECTIONS, MAX_NAMES = 200_000, 32 << 20
_NO_BYTES = 8
_EXTENDED = 0xFFFF
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")


@dataclass(frozen=True)
class Section:
    """`offset` and `size` in bytes of the file; a section without bytes in the file has size 0."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Elf:
    """`machine`, `flags`: `e_machine`, `e_flags`; `abi_version`: `EI_ABIVERSION`."""

    machine: int
    abi_version: int
    flags: int
    sections: tuple[Section, ...]

    def named(self, *names: str) -> list[Section]:
        """The sections of these names that hold bytes, in the file's order."""
        return [section for section in self.sections if section.name in names and section.size]


def read_elf(reader: RangeReader, what: str) -> Elf | None:
    """The frame, or None where the file is no ELF file. Raises QdcError `elf.*` on a malformed one."""
    if reader.size < 4 or reader.read(0, 4) != MAGIC:
        return None
    if reader.size < _HEADER.size:
        raise _bad("truncated", f"{what}: {reader.size} bytes are no ELF header")
    header = _HEADER.unpack(reader.read(0, _HEADER.size))
    identity, _, machine, _, _, _, table, flags, _, _, _, size, count, names = header
    if identity[4] != 2 or identity[5] != 1:
        raise _bad("kind", f"{what}: a 32-bit or big-endian ELF file is not read")
    sections = _sections(reader, what, table, size, count, names) if table else ()
    return Elf(machine, identity[8], flags, sections)


def _sections(reader: RangeReader, what: str, table: int, size: int, count: int, names: int) -> tuple[Section, ...]:
    if size != _SECTION.size or table + size > reader.size:
        raise _bad("sections", f"{what}: its section table at {table} is not in the file")
    if count == 0 or names == _EXTENDED:
        first = _SECTION.unpack(reader.read(table, size))
        count, names = count or first[5], first[6] if names == _EXTENDED else names
    if not 0 < count <= MAX_SECTIONS or table + count * size > reader.size or names >= count:
        raise _bad("sections", f"{what}: its header claims {count} sections")
    rows = list(_SECTION.iter_unpack(reader.read(table, count * size)))
    start, length = rows[names][4], rows[names][5]
    if start + length > reader.size or length > MAX_NAMES:
        raise _bad("sections", f"{what}: the names of its sections are not in the file")
    text = reader.read(start, length)
    found = []
    for row in rows:
        kind, offset, extent = row[1], row[4], 0 if row[1] in (0, _NO_BYTES) else row[5]
        if extent and offset + extent > reader.size:
            raise _bad("section", f"{what}: a section of type {kind} at {offset} ends after the file does")
        end = text.find(b"\0", row[0]) if row[0] < length else -1
        name = text[row[0] : min(end, row[0] + 256)] if end >= 0 else b""
        found.append(Section(name.decode("utf-8", "replace"), offset, extent))
    return tuple(found)


def _bad(id: str, message: str) -> QdcError:
    return QdcError(f"elf.{id}", message, exit_code=COULD_NOT)
