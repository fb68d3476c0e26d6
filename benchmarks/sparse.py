"""Large files that are mostly zeros: only the rest is kept, so that 20 GB fit into a few MB of memory and disk."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import tarfile
from pathlib import Path

BLOCK = 512
SHARD = 4_000_000_000
_ROWS, _COLUMNS, _GROUP = 4096, 14336, 128


class Sparse:
    """Bytes in `parts` (offset -> bytes) among zeros; `len` and slices as of bytes, for a server of ranges."""

    def __init__(self) -> None:
        self.parts: dict[int, bytes] = {}
        self.size = self.files = self.tensors = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, where: slice) -> bytes:
        start, stop, _ = where.indices(self.size)
        out = bytearray(max(0, stop - start))
        for offset, data in self.parts.items():
            low, high = max(start, offset), min(stop, offset + len(data))
            if low < high:
                out[low - start : high - start] = data[low - offset : high - offset]
        return bytes(out)

    def put(self, data: bytes) -> None:
        self.parts[self.size] = data
        self.size += len(data)

    def member(self, name: str, data: bytes | Sparse) -> None:
        """A file of a tar."""
        info = tarfile.TarInfo(name)
        info.size = len(data)
        self.put(info.tobuf(tarfile.GNU_FORMAT))
        if isinstance(data, bytes):
            self.put(data)
        else:
            self.parts |= {self.size + offset: part for offset, part in data.parts.items()}
            self.size += data.size
        self.size += -self.size % BLOCK

    def end(self) -> None:
        self.size += 2 * BLOCK

    def write(self, path: Path) -> None:
        with path.open("wb") as stream:
            for offset, data in self.parts.items():
                stream.seek(offset)
                stream.write(data)
            stream.truncate(self.size)

    def sha256(self) -> str:
        state, at, zeros = hashlib.sha256(), 0, bytes(1 << 20)
        for offset, data in [*sorted(self.parts.items()), (self.size, b"")]:
            while at < offset:
                step = min(len(zeros), offset - at)
                state.update(zeros[:step])
                at += step
            state.update(data)
            at += len(data)
        return state.hexdigest()


def weights(size: int, number: int, noise: bool) -> Sparse:
    """A safetensors file of about `size` bytes: packed INT4 modules of a large model's shape, group 128."""
    packed, scale = _ROWS * _COLUMNS // 2, _ROWS * _COLUMNS // _GROUP * 2
    count = max(1, math.ceil(size / (packed + scale + 16)))
    table, at = {}, 0
    for part, dtype, shape, length in (
        ("weight_shape", "I64", [2], 16),
        ("weight_packed", "I32", [_ROWS, _COLUMNS // 8], packed),
        ("weight_scale", "BF16", [_ROWS, _COLUMNS // _GROUP], scale),
    ):
        for index in range(count):
            entry = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + length]}
            table[f"model.layers.{number}.mlp.experts.{index}.up_proj.{part}"] = entry
            at += length
    header = json.dumps(table, separators=(",", ":")).encode()
    out = Sparse()
    out.put(struct.pack("<Q", len(header)) + header + struct.pack("<2q", _ROWS, _COLUMNS) * count)
    rest = count * (packed + scale)
    while noise and rest:
        step = min(rest, 1 << 24)
        out.put(os.urandom(step).translate(_SKEWED))
        rest -= step
    out.size += rest
    out.tensors = 3 * count
    return out


# Two INT4 codes a byte as weights have them: near zero often, far from it seldom, so that gzip finds a little.
_NEAR = [code for code, often in zip(range(16), (0, 0, 0, 1, 1, 1, 2, 3, 3, 2, 1, 1, 1, 0, 0, 0), strict=True)
         for _ in range(often)]  # fmt: skip
_SKEWED = bytes(_NEAR[byte >> 4] << 4 | _NEAR[byte & 15] for byte in range(256))


def weight_layer(size: int, noise: bool = False) -> Sparse:
    """A raw layer with a target's weights, in files of up to 4 GB."""
    layer = Sparse()
    while layer.size < size:
        file = weights(min(SHARD, size - layer.size), layer.files, noise)
        layer.files += 1
        layer.tensors += file.tensors
        layer.member(f"models/t/model-{layer.files:05}.safetensors", file)
    layer.end()
    return layer
