"""Shared objects with CUDA code for given architectures, as the linker lays them out: an ELF file with `.nv_fatbin`."""

from __future__ import annotations

import struct

MAGIC, PTX, CUBIN = 0xBA55ED50, 1, 2
SUFFIX = {"": 0, "a": 1 << 20, "f": 1 << 21}


def fatbin(*codes: str) -> bytes:
    """`sm_86`, `sm_90a`: machine code; `compute_80`: PTX."""
    entries = b""
    for code in codes:
        kind, _, arch = code.partition("_")
        suffix = arch[-1] if arch[-1] in "af" else ""
        number = int(arch.removesuffix(suffix))
        payload = _cubin(number) if kind == "sm" else b".version 8.0\n.target sm_80\n".ljust(64, b"\0")
        entries += struct.pack("<HHIQIIHHIIIQ", PTX if kind == "compute" else CUBIN, 0x0101, 64, len(payload), 0, 0,
                               0, 0, number, 0, 0, SUFFIX[suffix] | 1).ljust(64, b"\0")  # fmt: skip
        entries += payload
    return struct.pack("<IHHQ", MAGIC, 1, 16, len(entries)) + entries


def _cubin(number: int) -> bytes:
    header = b"\x7fELF\x02\x01\x01\x33\x07" + bytes(7)
    flags = (number << 16) | 0x500 | number
    return (header + struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 0, flags, 64, 0, 0, 0, 0, 0)).ljust(128, b"\0")


def library(*fatbins: bytes) -> bytes:
    """An ELF shared object (x86-64, little-endian) whose section `.nv_fatbin` holds the containers."""
    body = b"".join(data + bytes(-len(data) % 8) for data in fatbins)
    names = b"\0.nv_fatbin\0.shstrtab\0"
    start, strings = 64, 64 + len(body)
    table = strings + len(names) + (-(strings + len(names)) % 8)
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = ident + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, table, 0, 64, 56, 0, 64, 3, 2)
    sections = bytes(64)
    sections += struct.pack("<IIQQQQIIQQ", 1, 1, 2, 0, start, len(body), 0, 0, 8, 0)
    sections += struct.pack("<IIQQQQIIQQ", 12, 3, 0, 0, strings, len(names), 0, 0, 1, 0)
    return (header + body + names).ljust(table, b"\0") + sections
