"""INT4 codes and the int32 words that hold them, in plain Python, for spot checks of what an image holds.

Layout: the code of column 8j+i is nibble i (bits 4i..4i+3, low nibble first) of word j, stored as code + 8
(compressed-tensors "pack-quantized", 4 bits, symmetric). Bulk work is done elsewhere, in tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from qdc.core.errors import QdcError

PER_WORD = 8
LOW, HIGH = -8, 7


def pack(codes: Sequence[int]) -> list[int]:
    """Signed int32 words of one row of codes in [-8, 7]; the last word is filled with stored zeros."""
    words = []
    for start in range(0, len(codes), PER_WORD):
        word = 0
        for index, code in enumerate(codes[start : start + PER_WORD]):
            if not LOW <= code <= HIGH:
                raise QdcError("int4.range", f"code {code} is outside [-8, 7]", exit_code=4)
            word |= (code + 8) << (4 * index)
        words.append(word - (1 << 32) if word >= 1 << 31 else word)
    return words


def unpack(words: Sequence[int], columns: int) -> list[int]:
    """The first `columns` codes of one row of int32 words. Raises QdcError if the words are too few."""
    if columns > len(words) * PER_WORD:
        raise QdcError("int4.length", f"{len(words)} words hold fewer than {columns} codes", exit_code=4)
    return [((words[column // PER_WORD] >> (4 * (column % PER_WORD))) & 15) - 8 for column in range(columns)]


def unpack_bytes(data: bytes, columns: int) -> list[int]:
    """`unpack` of little-endian int32 bytes."""
    return unpack(struct.unpack(f"<{len(data) // 4}i", data[: len(data) // 4 * 4]), columns)


def bf16(data: bytes) -> list[float]:
    """Little-endian BF16 bytes as floats."""
    return [struct.unpack("<f", b"\0\0" + data[index : index + 2])[0] for index in range(0, len(data) - 1, 2)]
