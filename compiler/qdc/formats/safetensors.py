"""The header of a safetensors file, read strictly, a small writer, and a copy under other names.

Knows names, dtypes, shapes and byte ranges; knows nothing of what the numbers mean. Loads no tensor library.
Format: 8 bytes little-endian header length, a JSON object, then the tensors' bytes without holes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdc.core.errors import QdcError
from qdc.formats.ranges import FileRange, RangeReader

MAX_HEADER = 100_000_000
_CHUNK = 1 << 24
BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6,
        "F6_E3M2": 6, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64,
        "I64": 64, "F64": 64, "C64": 64}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """`offset` counts from the start of the file; `size` in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Header:
    """`tensors` in the order of their bytes; `length` = bytes before the first tensor; `metadata`: text."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    length: int


def read_header(source: Path | RangeReader, what: str | None = None) -> Header:
    """The checked header. Raises QdcError `safetensors.*` where the file is not exactly well formed:

    a header length out of bounds, JSON that is no such header, duplicate names, unknown dtypes, sizes that do
    not fit shapes, ranges that overlap, leave holes, or end before or after the file does.
    """
    reader = FileRange(source) if isinstance(source, Path) else source
    what = what or (str(source) if isinstance(source, Path) else "safetensors")
    if reader.size < 8:
        raise _bad("truncated", f"{what}: {reader.size} bytes are no safetensors file")
    (length,) = struct.unpack("<Q", reader.read(0, 8))
    if length > min(MAX_HEADER, reader.size - 8):
        raise _bad("header-length", f"{what}: the header claims {length} bytes of {reader.size}")
    table = _table(reader.read(8, length), what)
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _bad("metadata", f"{what}: __metadata__ must map text to text")
    tensors = {name: _tensor(name, entry, 8 + length, what) for name, entry in table.items()}
    ordered = sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size, item[0]))
    at = 8 + length
    for name, tensor in ordered:
        if tensor.offset != at:
            kind = "overlaps another" if tensor.offset < at else "leaves a hole before it"
            raise _bad("layout", f"{what}: tensor {name!r} {kind} (offset {tensor.offset}, expected {at})")
        at += tensor.size
    if at != reader.size:
        raise _bad("truncated", f"{what}: tensors end at {at}, the file at {reader.size}")
    return Header(dict(ordered), metadata, 8 + length)


def read_tensor(reader: RangeReader, header: Header, name: str, offset: int = 0, length: int | None = None) -> bytes:
    """`length` bytes (default: to its end) of tensor `name` from `offset` within it."""
    if name not in header.tensors:
        raise _bad("no-tensor", f"no tensor {name!r}")
    tensor = header.tensors[name]
    length = tensor.size - offset if length is None else length
    if not 0 <= offset <= offset + length <= tensor.size:
        raise _bad("range", f"tensor {name!r} has {tensor.size} bytes, wanted {length} at {offset}")
    return reader.read(tensor.offset + offset, length)


def write(
    path: Path,
    tensors: Mapping[str, tuple[str, Sequence[int], bytes]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `name -> (dtype, shape, bytes)`; wide dtypes first, then by name, so that each is aligned."""
    path.write_bytes(dumps(tensors, metadata))


def dumps(tensors: Mapping[str, tuple[str, Sequence[int], bytes]], metadata: Mapping[str, str] | None = None) -> bytes:
    """The file's bytes; see `write`. Raises QdcError if bytes do not fit dtype and shape."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at, parts = 0, []
    for name in sorted(tensors, key=lambda name: (-BITS.get(tensors[name][0], 0), name)):
        dtype, shape, data = tensors[name]
        entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        _tensor(name, entry, 0, "write")
        table[name] = entry
        parts.append(data)
        at += len(data)
    return _head(table) + b"".join(parts)


def copy(source: Path, target: Path, names: Mapping[str, str]) -> int:
    """Write a file of the tensors of `source` that `names` (old -> new) has, byte for byte; how many there are.

    Dtypes, shapes, order and metadata stay. Nothing is loaded whole. Raises QdcError as `read_header` does, or if two
    tensors would have the same name.
    """
    header = read_header(source)
    kept = [(names[name], tensor) for name, tensor in header.tensors.items() if name in names]
    if len({name for name, _ in kept}) != len(kept):
        raise _bad("names", f"{source}: two tensors would have the same name")
    table: dict[str, Any] = {"__metadata__": header.metadata} if header.metadata else {}
    at = 0
    for name, tensor in kept:
        table[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.size]}
        at += tensor.size
    with source.open("rb") as reading, target.open("wb") as writing:
        writing.write(_head(table))
        for _, tensor in kept:
            reading.seek(tensor.offset)
            left = tensor.size
            while left:
                chunk = reading.read(min(left, _CHUNK))
                if not chunk:
                    raise _bad("truncated", f"{source}: it ends inside a tensor")
                writing.write(chunk)
                left -= len(chunk)
    return len(kept)


def _head(table: Mapping[str, Any]) -> bytes:
    """Length and header, padded so that the tensors after it are aligned."""
    header = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header


def _table(data: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("duplicate names")
        return table

    try:
        table = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
        json.dumps(table, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise _bad("header", f"{what}: the header is not JSON ({error})") from error
    if not isinstance(table, dict):
        raise _bad("header", f"{what}: the header is not a JSON object")
    return table


def _tensor(name: str, entry: Any, base: int, what: str) -> Tensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _bad("entry", f"{what}: tensor {name!r} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _bad("dtype", f"{what}: tensor {name!r} has the unknown dtype {dtype!r}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad("entry", f"{what}: tensor {name!r} has a malformed shape or range")
    bits = math.prod(shape) * BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise _bad("size", f"{what}: tensor {name!r} ({dtype} {shape}) does not fit {offsets[1] - offsets[0]} bytes")
    return Tensor(dtype, tuple(shape), base + offsets[0], offsets[1] - offsets[0])


def _naturals(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(item) is int and 0 <= item < 1 << 62 for item in value)
    )


def _bad(id: str, message: str) -> QdcError:
    return QdcError(f"safetensors.{id}", message, exit_code=4)
