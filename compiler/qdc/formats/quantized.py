"""What the bytes of a model folder say of its quantization, in any of three conventions, and what its config claims.

compressed-tensors (`weight_packed`, `weight_scale`, `weight_shape`), AutoAWQ (`qweight` packed along the outputs,
`qzeros`, `scales`) and GPTQ (`qweight` packed along the inputs, `qzeros`, `scales`, `g_idx`). Facts come from tensor
names, shapes and the zero points; `claimed` reads the claims apart from them. Standard library only.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qdc.core.errors import COULD_NOT, QdcError
from qdc.formats import compressed_tensors, safetensors
from qdc.formats.compressed_tensors import Facts, Module
from qdc.formats.ranges import RangeReader

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_BITS = (2, 3, 4, 8)
_EIGHT = ("F8_E4M3", "F8_E5M2", "I8", "U8")
MAX_HEADERS = 16 << 20
"""Bytes of all headers of one model; they grow tenfold when they are read."""
MAX_ZEROS = 256 << 20
"""Bytes of zero points that are read of one model before the rest is left out."""


@dataclass(frozen=True)
class Weights:
    """`facts`: modules, plain matrices, contradictions, headers; `convention`: `compressed-tensors`, `awq`, `gptq`,
    `mixed`, or None where nothing is packed. `whole`: modules whose `weight` is stored in 8 bits, unpacked, and its
    dtype. `broken`: file -> why it cannot be read. `act_order`: whether columns
    are in another order than stored (None: not seen). `zero`: the one stored zero point of GPTQ or AWQ, if it is one.
    `partial`: what was not read."""

    facts: Facts
    convention: str | None
    whole: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    act_order: bool | None = None
    zero: int | None = None
    partial: str | None = None


@dataclass(frozen=True)
class Claimed:
    """What a config says: `method` (`quant_method`), `ignore` as names and `re:` patterns, None where it says nothing;
    `symmetric`, `act_order` likewise; `form`: `format`, `version` or `checkpoint_format`."""

    method: str
    bits: int | None
    group_size: int | None
    symmetric: bool | None
    ignore: tuple[str, ...] | None
    form: str | None = None
    act_order: bool | None = None


def read_weights(files: Mapping[str, RangeReader], limit: int = MAX_ZEROS) -> Weights:
    """Facts of all safetensors `files` (name -> bytes) of one model; a file that cannot be read is in `broken`.

    `limit`: bytes of zero points and column orders that may be read.
    """
    readable: dict[str, RangeReader] = {}
    headers: dict[str, safetensors.Header] = {}
    broken: dict[str, str] = {}
    left = MAX_HEADERS
    for name, reader in sorted(files.items()):
        try:
            left -= _header_length(reader)
            if left < 0:
                raise _bad(f"{name}: headers of more than {MAX_HEADERS} bytes are not read")
            headers[name] = safetensors.read_header(reader, name)
            readable[name] = reader
        except QdcError as error:
            broken[name] = error.message
    facts = compressed_tensors.read_facts(readable, headers)
    where = {tensor: (file, header) for file, header in headers.items() for tensor in header.tensors}
    names = sorted({name.rpartition(".")[0] for name in where if name.rpartition(".")[2] in _PARTS})
    scan = _Scan(readable, where, limit)
    for name in names:
        scan.module(name)
    modules = facts.quantized | scan.modules
    kinds = {"compressed-tensors"} if facts.quantized else set()
    kinds |= set(scan.kinds)
    whole = {
        name.removesuffix(".weight"): header.tensors[name].dtype
        for name, (_, header) in where.items()
        if name.endswith(".weight") and header.tensors[name].dtype in _EIGHT
    }
    alone = {f"{name} lacks weight_packed, weight_shape" for name in whole}
    problems = [*(problem for problem in facts.problems if problem not in alone), *scan.problems]
    problems += [f"{name} is stored quantized and plain" for name in sorted(scan.modules.keys() & set(facts.plain))]
    order = scan.order
    if facts.quantized and any(f"{name}.weight_g_idx" in where for name in facts.quantized):
        order = True
    elif facts.quantized and not scan.modules:
        order = False
    return Weights(
        Facts(modules, facts.plain, tuple(problems), facts.files),
        kinds.pop() if len(kinds) == 1 else "mixed" if kinds else None,
        whole,
        broken,
        order,
        scan.zeros.pop() if len(scan.zeros) == 1 else None,
        scan.partial,
    )


def _header_length(reader: RangeReader) -> int:
    """What the first bytes of a safetensors file say of its header; 0 where they cannot be read."""
    return int.from_bytes(reader.read(0, 8), "little") if reader.size >= 8 else 0


class _Scan:
    """AutoAWQ's and GPTQ's modules, one after the other."""

    def __init__(
        self, readers: Mapping[str, RangeReader], where: Mapping[str, tuple[str, safetensors.Header]], limit: int
    ) -> None:
        self.readers, self.where, self.left = readers, where, limit
        self.modules: dict[str, Module] = {}
        self.kinds: set[str] = set()
        self.problems: list[str] = []
        self.order: bool | None = None
        self.zeros: set[int] = set()
        self.partial: str | None = None

    def module(self, name: str) -> None:
        parts = {part: self._tensor(f"{name}.{part}") for part in _PARTS}
        missing = [part for part in ("qweight", "scales") if parts[part] is None]
        if missing:
            self.problems.append(f"{name} lacks {', '.join(missing)}")
            return
        codes, scales, zeros, order = parts["qweight"], parts["scales"], parts["qzeros"], parts["g_idx"]
        assert codes is not None and scales is not None
        if len(codes.shape) != 2 or len(scales.shape) != 2 or codes.dtype != "I32" or scales.dtype not in _FLOATS:
            text = f"{codes.dtype} {list(codes.shape)}, scales {scales.dtype} {list(scales.shape)}"
            self.problems.append(f"{name}.qweight is {text}")
            return
        found = _shape(codes.shape, scales.shape, zeros.shape if zeros is not None else None)
        if found is None:
            self.problems.append(f"{name}: qweight {list(codes.shape)} and scales {list(scales.shape)} do not fit")
            return
        kind, bits, rows, columns = found
        groups = scales.shape[0]
        if groups < 1 or columns % groups:
            self.problems.append(f"{name}: {groups} scales a column do not divide {columns} inputs")
            return
        if zeros is not None and zeros.shape != (groups, -(-rows * bits // 32)):
            self.problems.append(f"{name}.qzeros is {list(zeros.shape)}, scales are {list(scales.shape)}")
        if order is not None:
            self._columns(name, order, columns, columns // groups)
        symmetric = True if zeros is None else self._one_zero(name, bits, kind)
        self.kinds.add(kind)
        file = self.where[f"{name}.qweight"][0]
        self.modules[name] = Module(name, (rows, columns), bits, columns // groups, symmetric, file)

    def _tensor(self, name: str) -> safetensors.Tensor | None:
        return self.where[name][1].tensors[name] if name in self.where else None

    def _bytes(self, name: str) -> bytes:
        """A tensor's bytes; fewer, or none, once the limit is reached."""
        file, header = self.where[name]
        tensor = header.tensors[name]
        length = min(tensor.size, self.left, 16 << 20)
        if length < tensor.size:
            self.partial = f"only the first {length} bytes of {name} were read"
        self.left -= length
        return self.readers[file].read(tensor.offset, length)

    def _one_zero(self, name: str, bits: int, kind: str) -> bool:
        """Whether all zero points of a module are one value in the middle of the codes, as far as they were read."""
        data = self._bytes(f"{name}.qzeros")
        if not data:
            return True
        middle = 1 << (bits - 1)
        for zero in (middle - 1, middle) if kind == "gptq" else (middle,):
            word = _repeated(zero, bits)
            if word is not None and data == (word * (len(data) // len(word) + 1))[: len(data)]:
                self.zeros.add(zero)
                return True
        self.zeros.add(-1)
        return False

    def _columns(self, name: str, order: safetensors.Tensor, columns: int, group: int) -> None:
        if order.dtype != "I32" or order.shape != (columns,):
            self.problems.append(f"{name}.g_idx is {order.dtype} {list(order.shape)}, inputs are {columns}")
            return
        data = self._bytes(f"{name}.g_idx")
        plain = array("i", (column // group for column in range(len(data) // 4))).tobytes()
        self.order = bool(self.order) or data[: len(plain)] != plain


_FLOATS = ("F16", "BF16", "F32")


def _shape(
    codes: tuple[int, ...], scales: tuple[int, ...], zeros: tuple[int, ...] | None
) -> tuple[str, int, int, int] | None:
    """(convention, bits, out, in) that the shapes of one module allow, or None."""
    rows = scales[1]
    if codes[1] == rows:
        wide = zeros[1] if zeros is not None and len(zeros) == 2 else None
        for bits in (4, 8, 2, 3):
            if codes[0] * 32 % bits == 0 and (wide is None or -(-rows * bits // 32) == wide):
                return "gptq", bits, rows, codes[0] * 32 // bits
        return None
    for bits in _BITS:
        if -(-rows * bits // 32) == codes[1]:
            return "awq", bits, rows, codes[0]
    return None


def _repeated(value: int, bits: int) -> bytes | None:
    """The shortest whole number of 32-bit words filled with one code."""
    length = 96 if bits == 3 else 32
    number = sum(value << place for place in range(0, length, bits))
    return number.to_bytes(length // 8, "little")


def claimed(config: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> Claimed | None:
    """What `quantization_config` of a config.json claims, or the file of the tool `beside` it (quant_config.json,
    quantize_config.json); None where neither says anything. Raises QdcError `quantized.config` where it is malformed.
    """
    section = config.get("quantization_config")
    text = config.get("text_config")
    if section is None and isinstance(text, dict):
        section = text.get("quantization_config")
    if section is None:
        section = beside
    if section is None:
        return None
    if not isinstance(section, dict):
        raise _bad("quantization_config is not an object")
    method = section.get("quant_method")
    if "config_groups" in section or method == "compressed-tensors":
        return _of_groups(section)
    if method is None:
        method = "gptq" if "desc_act" in section else "awq" if "version" in section or "w_bit" in section else "unknown"
    bits = _number(section, "bits", "w_bit", "num_bits")
    group = _number(section, "group_size", "q_group_size")
    sym, zero = section.get("sym"), section.get("zero_point")
    symmetric = sym if isinstance(sym, bool) else not zero if isinstance(zero, bool) else None
    order = section.get("desc_act")
    form = section.get("checkpoint_format") or section.get("version") or section.get("fmt")
    return Claimed(
        str(method), bits, group, symmetric, _spared(section), str(form).lower() if form else None,
        order if isinstance(order, bool) else None,
    )  # fmt: skip


def _of_groups(section: Mapping[str, Any]) -> Claimed:
    """compressed-tensors: its groups of weights, which must agree to be one claim."""
    groups, found = section.get("config_groups"), []
    for group in groups.values() if isinstance(groups, dict) else []:
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            found.append(weights)
    if not found:
        raise _bad("quantization_config has no group of weights")
    values = {key: {str(weights.get(key)): weights.get(key) for weights in found} for key in _KEYS}
    for key, seen in values.items():
        if len(seen) > 1:
            raise _bad(f"quantization_config has groups with different {key}: {', '.join(sorted(seen))}")
    first = found[0]
    bits, size, symmetric = first.get("num_bits"), first.get("group_size"), first.get("symmetric")
    if type(bits) is not int or type(symmetric) is not bool or not (size is None or type(size) is int):
        raise _bad("quantization_config: num_bits, group_size or symmetric has a wrong type")
    ignore = section.get("ignore") or []
    if not isinstance(ignore, list) or not all(isinstance(item, str) for item in ignore):
        raise _bad("quantization_config: ignore is not a list of names")
    form = section.get("format") or next(iter(groups.values())).get("format") if isinstance(groups, dict) else None
    kind = first.get("type", "int")
    form = f"{form} {kind}" if kind != "int" else form
    return Claimed("compressed-tensors", bits, size, symmetric, tuple(ignore), form, bool(first.get("actorder")))


_KEYS = ("num_bits", "group_size", "symmetric", "type", "actorder")


def _number(section: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = section.get(name)
        if value is not None and type(value) is not int:
            raise _bad(f"quantization_config: {name} is {value!r}, not a whole number")
        if value is not None:
            return int(value)
    return None


def _spared(section: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Modules that AutoAWQ (parts of names) or GPTQ (`dynamic` rules that start with `-:`) leave out, as patterns."""
    listed = section.get("modules_to_not_convert")
    if isinstance(listed, list):
        return tuple(f"re:.*{re.escape(item)}" for item in listed if isinstance(item, str))
    dynamic = section.get("dynamic")
    if isinstance(dynamic, dict):
        return tuple(f"re:{key[2:]}" for key in dynamic if isinstance(key, str) and key.startswith("-:"))
    return None


def unread_patterns(patterns: Iterable[str]) -> str | None:
    """Why these patterns cannot be compared with names; None if they can."""
    try:
        compressed_tensors.ignored("", patterns)
    except QdcError as error:
        return error.message
    return None


def _bad(message: str) -> QdcError:
    return QdcError("quantized.config", message, exit_code=COULD_NOT)
