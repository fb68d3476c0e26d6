"""Whether two models that are other files hold the same tensors: under other names, in another order, in other files.

A packed target is wrapped as a whole model for engines that have no class for less: names change, no number does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qdc.core.errors import QdcError
from qdc.formats import qwen35, ranges, safetensors
from qdc.formats.image import Image
from qdc.formats.ranges import RangeReader

_MOST = 200_000
"""Tensors of a model; more are not compared."""


@dataclass(frozen=True)
class Held:
    """One tensor: its name, dtype and shape, and where its bytes lie."""

    name: str
    kind: tuple[str, tuple[int, ...]]
    reader: RangeReader
    offset: int
    size: int


def same_tensors(a: Image, was: Iterable[str], b: Image, now: Iterable[str]) -> str | None:
    """How two models with the same tensors differ, in words; None where they hold other tensors or cannot be read.

    `was`, `now`: the weight files, as paths in each image. Bytes are read only where all names, types and shapes agree.
    """
    try:
        sides = [_held(image, paths) for image, paths in ((a, was), (b, now))]
        left, right = ({qwen35.text_form(held.name): held for held in side} for side in sides)
        alike = len(left) == len(sides[0]) and len(right) == len(sides[1]) and left.keys() == right.keys()
        if not left or not alike or any(left[name].kind != right[name].kind for name in left):
            return None
        if [held.name for held in sides[0]] == [held.name for held in sides[1]]:
            return None  # The same names in the same order: it is the numbers that differ.
        for name in sorted(left, key=lambda name: (left[name].size, name)):
            if not _equal(left[name], right[name]):
                return None
    except QdcError:
        return None
    wrapped = [any(held.name.startswith(qwen35.WHOLE) for held in side) for side in sides]
    if wrapped[0] == wrapped[1]:
        how = "stored in another order or in other files"
    else:
        how = "wrapped as a whole model" if wrapped[1] else "no longer wrapped as a whole model"
    return f"the same {len(left)} tensors, {how}"


def _held(image: Image, paths: Iterable[str]) -> list[Held]:
    found: list[Held] = []
    for path in sorted(paths):
        reader = image.open(path)
        for name, tensor in safetensors.read_header(reader, path).tensors.items():
            found.append(Held(name, (tensor.dtype, tensor.shape), reader, tensor.offset, tensor.size))
        if len(found) > _MOST:
            return []
    return found


def _equal(left: Held, right: Held) -> bool:
    for at in range(0, left.size, ranges.CHUNK):
        length = min(ranges.CHUNK, left.size - at)
        if left.reader.read(left.offset + at, length) != right.reader.read(right.offset + at, length):
            return False
    return True
