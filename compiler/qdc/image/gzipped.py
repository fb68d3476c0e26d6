"""The single tar file compressed, as a contest takes it (`image.tar.gz`), and its size before it is written.

One gzip member with a fixed header: no time, no name. The tar is cut into pieces of one size, each deflated by itself
on a thread (zlib lets them run at once) and ended at a byte, so that they stand one after another in one stream. The
same image gives the same bytes with the same zlib. Knows no store and no limit.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from qdc.image.export import Progress, archive_chunks, archive_frame, archive_size, quiet, written
from qdc.image.layers import Layer, VirtualImage, read_image
from qdc.image.tar import Resolve
from qdc.image.virtual import layer_range

PIECE = 1 << 20
LEVEL = 6
"""gzip's own default: what `docker save | gzip` gives."""
HEADER = b"\x1f\x8b\x08\x00" + bytes(4) + b"\x00\xff"
SAMPLES = 40
SAMPLE = 1 << 18
METHOD = f"{SAMPLES} pieces of {SAMPLE >> 10} KiB of each layer deflated, spread evenly; smaller layers whole"


@dataclass(frozen=True)
class Sampled:
    """A layer's compressed size from samples: `bytes`, and `margin`, two standard errors of it (0: read whole)."""

    bytes: float
    margin: float


@dataclass(frozen=True)
class Written:
    """`predicted`, `margin`: bytes, before it was written; `bytes`: as it is; `raw`: of the tar in it."""

    image: VirtualImage
    predicted: int
    margin: int
    bytes: int
    raw: int


def _deflated(piece: bytes) -> bytes:
    state = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return state.compress(piece) + state.flush(zlib.Z_SYNC_FLUSH)


def _pieces(chunks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of `size`, the last one shorter."""
    held = bytearray()
    for chunk in chunks:
        held += chunk
        while len(held) >= size:
            yield bytes(held[:size])
            del held[:size]
    if held:
        yield bytes(held)


def gzipped(chunks: Iterable[bytes], threads: int | None = None) -> Iterator[bytes]:
    """The gzip stream of `chunks`, piece by piece; the same whatever the number of threads."""
    count = threads or len(os.sched_getaffinity(0))
    check, size = 0, 0
    yield HEADER
    with ThreadPoolExecutor(count) as pool:
        running: deque[Future[bytes]] = deque()
        for piece in _pieces(chunks, PIECE):
            check, size = zlib.crc32(piece, check), size + len(piece)
            running.append(pool.submit(_deflated, piece))
            if len(running) > 2 * count:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    yield zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS).flush(zlib.Z_FINISH)
    yield struct.pack("<II", check, size & 0xFFFFFFFF)


def sampled(image: VirtualImage, layer: Layer, resolve: Resolve) -> Sampled:
    """The compressed size of one layer, from pieces of it."""
    layer_bytes = layer_range(image, layer, resolve)
    size = layer_bytes.size
    if size <= SAMPLES * SAMPLE:
        parts = _pieces(iter((layer_bytes.read(0, size),)), PIECE)
        return Sampled(sum(len(_deflated(part)) for part in parts), 0)
    starts = [index * (size - SAMPLE) // (SAMPLES - 1) for index in range(SAMPLES)]
    ratios = [len(_deflated(layer_bytes.read(start, SAMPLE))) / SAMPLE for start in starts]
    margin = 2 * stdev(ratios) / len(ratios) ** 0.5
    return Sampled(fmean(ratios) * size, margin * size)


def predicted(image: VirtualImage, resolve: Resolve) -> dict[str, Sampled]:
    """`diff_id` -> compressed size, of every layer."""
    return {layer.diff_id: sampled(image, layer, resolve) for layer in image.layers}


def expected(image: VirtualImage, samples: Mapping[str, Sampled]) -> tuple[int, int]:
    """(compressed bytes, margin) of its archive. `samples`: as `predicted` gives them."""
    layers = samples.values()
    size = len(_deflated(archive_frame(image))) + sum(layer.bytes for layer in layers)
    return round(size), round(sum(layer.margin**2 for layer in layers) ** 0.5)


def export_gzip(
    image_folder: Path,
    resolve: Resolve,
    file: Path,
    progress: Progress = quiet,
    samples: Mapping[str, Sampled] | None = None,
) -> Written:
    """Write the image as one compressed tar `file`, replacing one that is there. Raises QdcError `export.*` (exit 4).

    `samples`: what `predicted` gave for it, if that is known already.
    """
    image = read_image(image_folder)
    samples = predicted(image, resolve) if samples is None else samples
    size, margin = expected(image, samples)
    total = archive_size(image)

    def watched() -> Iterator[bytes]:
        done = 0
        for chunk in archive_chunks(image, resolve):
            yield chunk
            done += len(chunk)
            progress(done, total)

    made = written(file, size, gzipped(watched()))
    return Written(image, size, margin, made, total)
