"""A model folder's scheme comes from its tensors in three conventions; what a config claims is read apart from them."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_formats_compressed_tensors import Tensors, packed_module, plain_module, quantization_config

from qdc.core.errors import QdcError
from qdc.formats import quantized, safetensors
from qdc.formats.quantized import Weights, claimed
from qdc.formats.ranges import BytesRange

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


def awq_module(
    name: str, rows: int, columns: int, group: int, bits: int = 4, zeros: bytes = b"\x87\x78\x97\x79"
) -> Tensors:
    """AutoAWQ `gemm`: qweight [in, out x bits / 32], packed along the outputs."""
    words, groups = rows * bits // 32, columns // group
    return {
        f"{name}.qweight": ("I32", [columns, words], bytes(4 * columns * words)),
        f"{name}.qzeros": ("I32", [groups, words], zeros * (groups * words)),
        f"{name}.scales": ("F16", [groups, rows], b"\x00\x20" * (groups * rows)),
    }


def gptq_module(
    name: str,
    rows: int,
    columns: int,
    group: int,
    bits: int = 4,
    zeros: bytes = b"\x77" * 4,
    order: list[int] | None = None,
) -> Tensors:
    """GPTQ: qweight [in x bits / 32, out], packed along the inputs; `order`: the group of each column."""
    deep, groups = columns * bits // 32, columns // group
    groups_of = order or [column // group for column in range(columns)]
    return {
        f"{name}.qweight": ("I32", [deep, rows], bytes(4 * deep * rows)),
        f"{name}.qzeros": (
            "I32",
            [groups, rows * bits // 32],
            (zeros * (groups * rows * bits // 32 * 4))[: groups * rows * bits // 8],
        ),
        f"{name}.scales": ("F16", [groups, rows], b"\x00\x20" * (groups * rows)),
        f"{name}.g_idx": ("I32", [columns], struct.pack(f"<{columns}i", *groups_of)),
    }


def weights(*parts: Tensors) -> Weights:
    tensors: Tensors = {}
    for part in parts:
        tensors |= part
    return quantized.read_weights({"m.safetensors": BytesRange(safetensors.dumps(tensors))})


NAME = "model.layers.0.mlp.up_proj"


@given(st.sampled_from(["ct", "awq", "gptq"]), st.sampled_from([2, 4, 8]), st.sampled_from([32, 64, 128]),
       st.integers(1, 3), st.integers(1, 5))  # fmt: skip
def test_scheme_comes_from_shapes(convention: str, bits: int, group: int, groups: int, rows: int) -> None:
    make = {"ct": packed_module, "awq": awq_module, "gptq": gptq_module}[convention]
    found = weights(make(NAME, 32 * rows, group * groups, group, bits), plain_module("model.embed_tokens", 4, 4))
    assert found.facts.problems == () and found.broken == {}
    module = found.facts.quantized[NAME]
    assert (module.bits, module.group_size, module.shape) == (bits, group, (32 * rows, group * groups))
    assert found.convention == {"ct": "compressed-tensors"}.get(convention, convention)
    assert found.facts.plain == ("model.embed_tokens",)


@pytest.mark.parametrize(
    ("module", "symmetric", "zero"),
    [
        (packed_module(NAME, 32, 64, 32), True, None),
        (packed_module(NAME, 32, 64, 32) | {f"{NAME}.weight_zero_point": ("I32", [4, 2], bytes(32))}, False, None),
        (gptq_module(NAME, 32, 64, 32), True, 7),
        (gptq_module(NAME, 32, 64, 32, zeros=b"\x88" * 4), True, 8),
        (gptq_module(NAME, 32, 64, 32, zeros=b"\x78" * 4), False, -1),
        (gptq_module(NAME, 32, 64, 32, bits=8, zeros=b"\x7f" * 4), True, 127),
        (gptq_module(NAME, 32, 64, 32, zeros=b"\x66" * 4), False, -1),
        (awq_module(NAME, 32, 64, 32), False, -1),
        (awq_module(NAME, 32, 64, 32, zeros=b"\x88" * 4), True, 8),
        (awq_module(NAME, 32, 64, 32, zeros=b"\x77" * 4), False, -1),
    ],
)
def test_symmetry_comes_from_the_zero_points(module: Tensors, symmetric: bool, zero: int | None) -> None:
    found = weights(module)
    assert found.facts.quantized[NAME].symmetric is symmetric
    assert found.zero == zero


def test_one_odd_zero_point_among_thousands_is_seen() -> None:
    tensors = gptq_module(NAME, 256, 4096, 32)
    dtype, shape, data = tensors[f"{NAME}.qzeros"]
    tensors[f"{NAME}.qzeros"] = (dtype, shape, data[:-1] + b"\x78")
    assert weights(tensors).facts.quantized[NAME].symmetric is False


def test_zero_points_beyond_the_limit_are_told_as_unread() -> None:
    tensors = gptq_module("a", 32, 64, 32) | gptq_module("b", 32, 64, 32, zeros=b"\x78" * 4)
    files = {"m.safetensors": BytesRange(safetensors.dumps(tensors))}
    assert quantized.read_weights(files).partial is None
    found = quantized.read_weights(files, limit=8)
    assert found.partial is not None and "bytes of" in found.partial


def test_headers_without_end_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = safetensors.dumps(gptq_module("a", 32, 64, 32))
    whole, header = BytesRange(data), int.from_bytes(data[:8], "little")
    monkeypatch.setattr(quantized, "MAX_HEADERS", 2 * header - 1)
    found = quantized.read_weights({"1.safetensors": whole, "2.safetensors": whole})
    assert list(found.broken) == ["2.safetensors"] and "are not read" in found.broken["2.safetensors"]
    assert set(found.facts.quantized) == {"a"}


def test_an_order_of_columns_is_seen_in_g_idx() -> None:
    assert weights(gptq_module(NAME, 32, 64, 32)).act_order is False
    assert weights(gptq_module(NAME, 32, 64, 32, order=[1, 0] * 32)).act_order is True
    assert weights(packed_module(NAME, 32, 64, 32)).act_order is False
    reordered = packed_module(NAME, 32, 64, 32) | {f"{NAME}.weight_g_idx": ("I32", [64], bytes(256))}
    assert weights(reordered).act_order is True
    assert weights(awq_module(NAME, 32, 64, 32)).act_order is None


@pytest.mark.parametrize("make", [awq_module, gptq_module])
@pytest.mark.parametrize("part", ["qweight", "scales"])
def test_codes_without_scales_and_scales_without_codes_are_named(make: Any, part: str) -> None:
    tensors = make(NAME, 32, 64, 32)
    del tensors[f"{NAME}.{part}"]
    found = weights(tensors)
    assert found.facts.problems == (f"{NAME} lacks {part}",)
    assert found.facts.quantized == {}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"qzeros": ("I32", [3, 4], bytes(48))}, "qzeros is [3, 4]"),
        ({"g_idx": ("I32", [63], bytes(252))}, "g_idx is I32 [63]"),
        ({"scales": ("F16", [3, 32], bytes(192))}, "do not divide 64 inputs"),
        ({"qweight": ("I32", [8, 31], bytes(992))}, "do not fit"),
        ({"qweight": ("F16", [8, 32], bytes(512))}, "qweight is F16"),
        ({"weight": ("BF16", [32, 64], bytes(4096))}, "is stored quantized and plain"),
    ],
)  # fmt: skip
def test_contradictions_between_companions_are_named(change: Tensors, problem: str) -> None:
    tensors = gptq_module(NAME, 32, 64, 32) | {f"{NAME}.{part}": value for part, value in change.items()}
    assert any(problem in text for text in weights(tensors).facts.problems)


def test_modules_of_two_conventions_are_mixed() -> None:
    found = weights(gptq_module("a", 32, 64, 32), awq_module("b", 32, 64, 32))
    assert found.convention == "mixed" and set(found.facts.quantized) == {"a", "b"}


def test_weights_of_eight_bits_are_no_broken_pack() -> None:
    found = weights({"a.weight": ("F8_E4M3", [4, 4], bytes(16)), "a.weight_scale": ("F32", [1], bytes(4))})
    assert found.whole == {"a": "F8_E4M3"} and found.facts.problems == () and found.convention is None


def test_a_cut_file_does_not_hide_the_others() -> None:
    good, cut = safetensors.dumps(gptq_module("a", 32, 64, 32)), safetensors.dumps(gptq_module("b", 32, 64, 32))[:-1]
    found = quantized.read_weights({"1.safetensors": BytesRange(good), "2.safetensors": BytesRange(cut)})
    assert set(found.facts.quantized) == {"a"}
    assert "tensors end at" in found.broken["2.safetensors"]


AWQ = {"quant_method": "awq", "version": "GEMM", "bits": 4, "group_size": 128, "zero_point": True,
       "modules_to_not_convert": ["visual", "mlp.gate"]}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": True,
        "checkpoint_format": "gptq_v2", "dynamic": {"-:.*lm_head": {}, "+:.*mlp": {"bits": 8}}}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quantization_config": quantization_config(8, 64, ["lm_head"])},
         ("compressed-tensors", 8, 64, True, ("lm_head",), "pack-quantized", False)),
        ({"quantization_config": AWQ}, ("awq", 4, 128, False, (r"re:.*visual", r"re:.*mlp\.gate"), "gemm", None)),
        ({"quantization_config": GPTQ}, ("gptq", 4, 64, True, ("re:.*lm_head",), "gptq_v2", True)),
        ({"text_config": {"quantization_config": {**AWQ, "modules_to_not_convert": None}}},
         ("awq", 4, 128, False, None, "gemm", None)),
    ],
)  # fmt: skip
def test_claims_are_read_in_each_form(config: dict[str, Any], expected: tuple[Any, ...]) -> None:
    found = claimed(config)
    assert found is not None
    given_ = (found.method, found.bits, found.group_size, found.symmetric, found.ignore, found.form, found.act_order)
    assert given_ == expected


def test_the_files_of_older_tools_are_read() -> None:
    old_awq = claimed({}, {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"})
    old_gptq = claimed({}, {"bits": 4, "group_size": 128, "desc_act": False, "sym": False})
    assert old_awq is not None and (old_awq.method, old_awq.bits, old_awq.group_size) == ("awq", 4, 128)
    assert old_gptq is not None and (old_gptq.method, old_gptq.symmetric) == ("gptq", False)
    assert claimed({}) is None


def test_groups_that_disagree_make_no_claim() -> None:
    section = quantization_config()
    section["config_groups"]["group_1"] = {
        "targets": ["x"],
        "weights": {"num_bits": 8, "group_size": 32, "symmetric": True},
    }
    with pytest.raises(QdcError, match="different num_bits"):
        claimed({"quantization_config": section})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from([*AWQ, *GPTQ, "config_groups", "ignore", "format", "w_bit", "q_group_size"])


@settings(max_examples=120)
@given(st.dictionaries(FIELDS, JSON, max_size=6) | JSON)
def test_no_config_does_more_than_raise(section: Any) -> None:
    try:
        found = claimed({"quantization_config": section})
    except QdcError as error:
        assert error.id == "quantized.config"
        return
    assert found is None or found.bits is None or type(found.bits) is int


PARTS = st.sampled_from(["qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_shape"])
SHAPES = st.lists(st.integers(0, 40), min_size=1, max_size=3)


@settings(max_examples=300)
@given(st.dictionaries(PARTS, st.tuples(st.sampled_from(["I32", "F16", "I64", "BF16"]), SHAPES), max_size=7))
def test_no_shapes_do_more_than_become_problems(parts: dict[str, tuple[str, list[int]]]) -> None:
    tensors: Tensors = {}
    for part, (dtype, shape) in parts.items():
        size = safetensors.BITS[dtype] // 8
        for length in shape:
            size *= length
        tensors[f"m.{part}"] = (dtype, shape, bytes(size))
    found = weights(tensors)
    assert not found.facts.quantized or found.facts.quantized["m"].group_size > 0
