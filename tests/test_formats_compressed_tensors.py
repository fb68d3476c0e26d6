"""Facts of a packed model come from its bytes, and every contradiction in them is named."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdc.core.errors import QdcError
from qdc.formats import compressed_tensors, int4, safetensors
from qdc.formats.ranges import BytesRange

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

Tensors = dict[str, tuple[str, list[int], bytes]]


def packed_module(name: str, rows: int, columns: int, group: int, bits: int = 4) -> Tensors:
    """The three companion tensors of one quantized Linear."""
    words = -(-columns * bits // 32)
    row = struct.pack("<8i", *int4.pack([column % 16 - 8 for column in range(64)]))
    return {
        f"{name}.weight_packed": ("I32", [rows, words], (row * (rows * words))[: rows * words * 4]),
        f"{name}.weight_scale": ("BF16", [rows, columns // group], b"\x80\x3c" * (rows * columns // group)),
        f"{name}.weight_shape": ("I64", [2], struct.pack("<2q", rows, columns)),
    }


def plain_module(name: str, *shape: int) -> Tensors:
    count = 2
    for size in shape:
        count *= size
    return {f"{name}.weight": ("BF16", list(shape), bytes(count))}


def quantization_config(bits: int = 4, group: int = 32, ignore: list[str] | None = None) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ignore or [],
    }


def facts(*parts: Tensors) -> compressed_tensors.Facts:
    tensors: Tensors = {}
    for part in parts:
        tensors |= part
    return compressed_tensors.read_facts({"m": BytesRange(safetensors.dumps(tensors))})


@given(st.sampled_from([2, 4, 8]), st.sampled_from([32, 64, 128]), st.integers(1, 3), st.integers(1, 5))
def test_bits_and_group_come_from_shapes(bits: int, group: int, groups: int, rows: int) -> None:
    found = facts(packed_module("layers.0.q", rows, group * groups, group, bits))
    assert found.problems == ()
    assert (found.one("bits"), found.one("group_size"), found.one("symmetric")) == (bits, group, True)
    assert found.quantized["layers.0.q"].shape == (rows, group * groups)


def test_modules_that_differ_have_no_one_value() -> None:
    found = facts(packed_module("a", 2, 64, 32), packed_module("b", 2, 64, 64))
    assert found.one("bits") == 4
    assert found.one("group_size") is None


def test_zero_points_mean_asymmetric() -> None:
    found = facts(packed_module("a", 8, 64, 32), {"a.weight_zero_point": ("I32", [1, 2], bytes(8))})
    assert found.one("symmetric") is False


@pytest.mark.parametrize("part", compressed_tensors.COMPANIONS)
def test_a_missing_companion_is_named(part: str) -> None:
    tensors = packed_module("a", 2, 64, 32)
    del tensors[f"a.{part}"]
    found = facts(tensors)
    assert found.problems == (f"a lacks {part}",)
    assert found.quantized == {}


@pytest.mark.parametrize(
    ("part", "tensor", "why"),
    [
        ("weight_packed", ("I32", [2, 3], bytes(24)), "do not hold 64 columns"),
        ("weight_packed", ("I32", [3, 8], bytes(96)), "weight_shape says 2 x 64"),
        ("weight_packed", ("U8", [2, 8], bytes(16)), "weight_packed is U8"),
        ("weight_scale", ("BF16", [2, 3], bytes(12)), "do not divide"),
        ("weight_shape", ("I64", [3], bytes(24)), "entries"),
        ("weight_shape", ("I64", [2], struct.pack("<2q", -2, 64)), "weight_shape says -2"),
    ],
)
def test_shapes_that_contradict_each_other_are_named(part: str, tensor: Any, why: str) -> None:
    found = facts(packed_module("a", 2, 64, 32) | {f"a.{part}": tensor})
    assert len(found.problems) == 1 and why in found.problems[0]


def test_a_module_stored_twice_is_named() -> None:
    found = facts(packed_module("a", 2, 64, 32), plain_module("a", 2, 64))
    assert found.problems == ("a is stored quantized and plain",)


def test_the_same_tensor_in_two_files_is_named() -> None:
    data = BytesRange(safetensors.dumps(plain_module("a", 2, 2)))
    assert "a.weight is in one and in two" in compressed_tensors.read_facts({"one": data, "two": data}).problems[0]


def test_the_mask_is_compared_both_ways() -> None:
    found = facts(
        packed_module("model.layers.0.mlp.up_proj", 2, 32, 32),
        packed_module("model.layers.0.linear_attn.in_proj_a", 2, 32, 32),
        plain_module("model.layers.0.mlp.down_proj", 2, 32),
        plain_module("model.layers.0.linear_attn.in_proj_b", 2, 32),
        plain_module("model.embed_tokens", 4, 2),
        plain_module("model.layers.0.norm", 2),
        plain_module("model.layers.0.linear_attn.conv1d", 2, 1, 4),
    )
    assert compressed_tensors.mask_problems(found, [r"re:.*linear_attn\.in_proj_[ab]$", "lm_head"]) == [
        "model.layers.0.linear_attn.in_proj_a is quantized but ignored",
        "model.layers.0.mlp.down_proj is neither quantized nor ignored",
    ]


@pytest.mark.parametrize("pattern", ["re:(a+)+$", "re:(", "re:.*.*.*.*x", "re:" + "a" * 300])
def test_patterns_that_could_run_away_are_not_run(pattern: str) -> None:
    with pytest.raises(QdcError, match="ignore pattern"):
        compressed_tensors.ignored("a" * 60 + "!", [pattern])


def test_declared_reads_the_configuration() -> None:
    declared = compressed_tensors.read_declared({"quantization_config": quantization_config(4, 128, ["lm_head"])})
    assert declared == compressed_tensors.Declared(4, 128, True, ("lm_head",), "pack-quantized")
    assert compressed_tensors.read_declared({}) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
)


@given(st.sampled_from(["config_groups", "ignore", "format", "weights", "targets"]), JSON)
def test_any_damaged_configuration_is_an_error_or_read(key: str, value: Any) -> None:
    section = quantization_config()
    if key == "weights":
        section["config_groups"]["group_0"]["weights"] = value
    else:
        section[key] = value
    try:
        compressed_tensors.read_declared({"quantization_config": section})
    except QdcError as error:
        assert error.id == "compressed-tensors.config"
