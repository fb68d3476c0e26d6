"""What the bytes of a compressed-tensors "pack-quantized" model say: bits, group size, symmetry, census.

Facts come from tensor names, shapes and the 16 bytes of each `weight_shape`; the model's config.json is read
as a second witness (`Declared`), and contradictions are listed, not repaired. Knows no layer and no image.
Standard library only.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qdc.core.errors import QdcError
from qdc.formats import safetensors
from qdc.formats.ranges import RangeReader

COMPANIONS = ("weight_packed", "weight_scale", "weight_shape")
_EXTRA = ("weight_zero_point", "weight_g_idx")
_MAX_PATTERN, _MAX_NAME = 200, 200

VERSION = "0.19.0"
"""compressed-tensors version whose configuration is written."""


@dataclass(frozen=True)
class Module:
    """One quantized Linear. `shape` = (out, in); `bits` per code; `group_size` along `in`.

    `file` holds the tensor `weight_packed`; `symmetric`: no zero points are stored.
    """

    name: str
    shape: tuple[int, int]
    bits: int
    group_size: int
    symmetric: bool
    file: str


@dataclass(frozen=True)
class Declared:
    """What config.json's `quantization_config` says (one group of Linear weights)."""

    bits: int
    group_size: int | None
    symmetric: bool
    ignore: tuple[str, ...]
    format: str


@dataclass(frozen=True)
class Facts:
    """`quantized`: by name; `plain`: names of modules with a floating `weight` of two dimensions;

    `problems`: every contradiction found in the bytes, in words; `files`: file -> header.
    """

    quantized: dict[str, Module]
    plain: tuple[str, ...]
    problems: tuple[str, ...]
    files: dict[str, safetensors.Header] = field(repr=False)

    def one(self, what: str) -> Any:
        """The one value of `bits`, `group_size` or `symmetric` of all modules; None without one."""
        values = {getattr(module, what) for module in self.quantized.values()}
        return values.pop() if len(values) == 1 else None


def read_facts(files: Mapping[str, RangeReader], headers: dict[str, safetensors.Header] | None = None) -> Facts:
    """Facts of all safetensors `files` (name -> bytes) of one model; `headers`: theirs, where they were read already.

    Raises QdcError `safetensors.*`.
    """
    if headers is None:
        headers = {name: safetensors.read_header(reader, name) for name, reader in sorted(files.items())}
    where: dict[str, tuple[str, safetensors.Tensor]] = {}
    problems: list[str] = []
    for file, header in headers.items():
        for name, tensor in header.tensors.items():
            if name in where:
                problems.append(f"{name} is in {where[name][0]} and in {file}")
            where[name] = (file, tensor)
    names = {name.rpartition(".")[0] for name in where if name.rpartition(".")[2] in COMPANIONS + _EXTRA}
    quantized: dict[str, Module] = {}
    for name in sorted(names):
        module = _module(name, where, files, problems)
        if module is not None:
            quantized[name] = module
    plain = [
        name.removesuffix(".weight")
        for name, (_, tensor) in where.items()
        if name.endswith(".weight") and len(tensor.shape) == 2 and tensor.dtype in ("BF16", "F16", "F32")
    ]
    problems += [f"{name} is stored quantized and plain" for name in sorted(names.intersection(plain))]
    return Facts(quantized, tuple(sorted(plain)), tuple(problems), headers)


def quantization_config(scheme: Mapping[str, Any], ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of a config.json as vLLM 0.32 reads it; `scheme`: {bits, group_size, symmetric}.

    `ignored`: module names or `re:` patterns, in the engine's names.
    """
    weights = {
        "num_bits": int(scheme["bits"]),
        "type": "int",
        "symmetric": bool(scheme["symmetric"]),
        "strategy": "group",
        "group_size": int(scheme["group_size"]),
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "version": VERSION,
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": list(ignored),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "pack-quantized",
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
    }


def read_declared(config: Mapping[str, Any]) -> Declared | None:
    """`quantization_config` of a config.json, or None if it has none.

    Raises QdcError `compressed-tensors.config` when it is there and is not one group of integer weights.
    """
    section = config.get("quantization_config")
    if section is None:
        return None
    try:
        (group,) = section["config_groups"].values()
        weights = group["weights"]
        bits, size, symmetric = weights["num_bits"], weights["group_size"], weights["symmetric"]
        ignore, form = section.get("ignore") or [], section.get("format")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _bad("config", f"quantization_config is not one group of weights ({error!r})") from error
    if type(bits) is not int or type(symmetric) is not bool or not (size is None or type(size) is int):
        raise _bad("config", "quantization_config: num_bits, group_size or symmetric has a wrong type")
    if not isinstance(ignore, list) or not all(isinstance(item, str) for item in ignore):
        raise _bad("config", "quantization_config: ignore is not a list of names")
    if weights.get("type", "int") != "int" or form != "pack-quantized":
        raise _bad("config", f"quantization_config: format {form!r}, type {weights.get('type')!r} is not read")
    return Declared(bits, size, symmetric, tuple(ignore), form)


def ignored(name: str, patterns: Iterable[str]) -> bool:
    """Whether module `name` is matched: by equality, or by a `re:` pattern from the start of the name.

    Raises QdcError `compressed-tensors.pattern` on a pattern that is malformed or could run away.
    """
    for pattern in patterns:
        if not pattern.startswith("re:"):
            if name == pattern:
                return True
        elif _compile(pattern[3:]).match(name[:_MAX_NAME]):
            return True
    return False


def _as_stored(name: str) -> tuple[str, ...]:
    return (name,)


def mask_problems(
    facts: Facts, patterns: Iterable[str], names: Callable[[str], tuple[str, ...]] = _as_stored
) -> list[str]:
    """Where the stored modules contradict an ignore list: quantized though ignored, or plain though not.

    `names`: what the engine that reads the list may call a stored module. Only modules whose name holds `layers.`, and
    a top-level `fc`, can be plain by mistake: embeddings and heads are no quantization targets unless they are stored
    packed.
    """
    patterns = list(patterns)

    def spared(name: str) -> bool:
        return any(ignored(called, patterns) for called in names(name))

    problems = [f"{name} is quantized but ignored" for name in facts.quantized if spared(name)]
    for name in facts.plain:
        counts = "layers." in name or name.rpartition(".")[2] == "fc"
        if counts and not name.endswith("norm") and not spared(name):
            problems.append(f"{name} is neither quantized nor ignored")
    return problems


def _module(
    name: str,
    where: Mapping[str, tuple[str, safetensors.Tensor]],
    files: Mapping[str, RangeReader],
    problems: list[str],
) -> Module | None:
    missing = [part for part in COMPANIONS if f"{name}.{part}" not in where]
    if missing:
        problems.append(f"{name} lacks {', '.join(missing)}")
        return None
    (file, packed), (_, scale), (shape_file, shape) = (where[f"{name}.{part}"] for part in COMPANIONS)
    for part, tensor, dtypes, dimensions in (
        ("weight_packed", packed, ("I32",), 2),
        ("weight_scale", scale, ("BF16", "F16", "F32"), 2),
        ("weight_shape", shape, ("I64", "I32"), 1),
    ):
        if tensor.dtype not in dtypes or len(tensor.shape) != dimensions:
            problems.append(f"{name}.{part} is {tensor.dtype} {list(tensor.shape)}")
            return None
    if shape.shape != (2,):
        problems.append(f"{name}.weight_shape has {list(shape.shape)} entries")
        return None
    data = files[shape_file].read(shape.offset, shape.size)
    rows, columns = struct.unpack("<2q" if shape.dtype == "I64" else "<2i", data)
    if rows < 1 or columns < 1 or packed.shape[0] != rows or scale.shape[0] != rows:
        problems.append(f"{name}: weight_shape says {rows} x {columns}, weight_packed is {list(packed.shape)}")
        return None
    fits = [bits for bits in (4, 8, 2) if -(-columns * bits // 32) == packed.shape[1]]
    if not fits:
        problems.append(f"{name}: {packed.shape[1]} words a row do not hold {columns} columns")
        return None
    groups = scale.shape[1]
    if groups < 1 or columns % groups:
        problems.append(f"{name}: {groups} scales a row do not divide {columns} columns")
        return None
    return Module(name, (rows, columns), fits[0], columns // groups, f"{name}.weight_zero_point" not in where, file)


def _compile(pattern: str) -> re.Pattern[str]:
    runaway = re.search(r"\)\s*[*+{?]", pattern) or len(re.findall(r"(?<!\\)[*+{]", pattern)) > 3
    if len(pattern) > _MAX_PATTERN or runaway:
        raise _bad("pattern", f"ignore pattern {pattern[:60]!r} is not read: too complex")
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise _bad("pattern", f"ignore pattern {pattern[:60]!r}: {error}") from error


def _bad(id: str, message: str) -> QdcError:
    return QdcError(f"compressed-tensors.{id}", message, exit_code=4)
