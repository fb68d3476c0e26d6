"""An image of the store as `formats.oci` reads any other image, without writing it anywhere.

A layer of entries becomes a tar whose headers are in memory and whose contents stay in their files. This module
does not know the store: contents come through `resolve`.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from pathlib import Path

from qdc.formats.image import Image
from qdc.formats.ranges import FileRange, RangeReader, truncated
from qdc.image.layers import Layer, VirtualImage
from qdc.image.tar import BLOCK, END, Entry, Resolve, header


class TarRange:
    """The bytes of the tar of `entries` (arranged), read by position."""

    def __init__(self, entries: Sequence[Entry], resolve: Resolve) -> None:
        self._starts: list[int] = []
        self._parts: list[tuple[int, bytes | Path]] = []
        self._size = 0
        for entry in entries:
            self._add(header(entry))
            if entry.type == "file" and entry.size:
                self._add(resolve(str(entry.sha256)), entry.size)
                self._add(bytes(-entry.size % BLOCK))
        self._add(END)

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > self._size:
            raise truncated("layer", offset, length, self._size)
        pieces, at = [], bisect.bisect_right(self._starts, offset) - 1
        while length:
            size, part = self._parts[at]
            inner = offset - self._starts[at]
            take = min(length, size - inner)
            pieces.append(part[inner : inner + take] if isinstance(part, bytes) else FileRange(part).read(inner, take))
            offset, length, at = offset + take, length - take, at + 1
        return b"".join(pieces)

    def _add(self, part: bytes | Path, size: int | None = None) -> None:
        size = len(part) if isinstance(part, bytes) else size or 0
        if size:
            self._starts.append(self._size)
            self._parts.append((size, part))
            self._size += size


def as_image(image: VirtualImage, resolve: Resolve, where: str) -> Image:
    """`image` to be read; `where`: how a report calls it. Raises QdcError where a content is not to be found."""
    layers: list[tuple[RangeReader, str | None]] = [
        (layer_range(image, layer, resolve), f"sha256:{layer.diff_id}") for layer in image.layers
    ]
    return Image(where, image.config, layers, tags=(image.name,))


def layer_range(image: VirtualImage, layer: Layer, resolve: Resolve) -> RangeReader:
    """One of its layers as it is stored, read by position."""
    return TarRange(layer.entries, resolve) if layer.entries is not None else FileRange(image.file(layer, resolve))
