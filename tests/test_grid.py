"""The grid: codes, scales, packing and GPTQ behave as the served checkpoint needs, for any weights."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from qdc.core.errors import QdcError
from qdc.methods import grid, packing
from qdc.methods.gptq import Hessian, gptq_quantize, output_error

torch.set_num_threads(1)

SCHEME = {"bits": 4, "group_size": 8, "symmetric": True}
shapes = st.tuples(st.integers(1, 5), st.integers(1, 4))
seeds = st.integers(0, 2**31 - 1)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn_codes(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)


@given(shapes, seeds, st.floats(1e-20, 1e20))
def test_a_grid_point_has_its_own_code(shape: tuple[int, int], seed: int, size: float) -> None:
    codes = drawn_codes(seed, shape[0], 8 * shape[1])
    scale = (drawn(seed, *shape).abs() + 0.01).mul(size).to(torch.bfloat16)
    assert torch.equal(grid.encode(grid.decode(codes, scale), scale), codes)


@given(shapes, seeds, st.floats(1e-6, 1e6))
def test_rounding_to_nearest_moves_no_weight_beyond_half_a_step(shape: tuple[int, int], seed: int, size: float) -> None:
    weight = drawn(seed, shape[0], 8 * shape[1]) * size
    codes, scale = grid.rtn_quantize(weight, SCHEME)
    step = scale.float().repeat_interleave(8, dim=1)
    exact = codes.float() * step
    peak = weight.unflatten(1, (-1, 8)).abs().amax(-1).repeat_interleave(8, dim=1)
    rounding_of_scale = (peak - 7 * step).clamp(min=0)
    assert bool(((exact - weight).abs() <= step / 2 * (1 + 1e-5) + rounding_of_scale).all())
    assert scale.dtype == torch.bfloat16 and codes.abs().max() <= 8


def test_codes_are_chosen_against_the_rounded_scale() -> None:
    weight = torch.tensor([[7 * 1.003, 2.504, 0, 0, 0, 0, 0, 0]])
    codes, scale = grid.rtn_quantize(weight, SCHEME)
    assert scale.item() == 1.0
    assert codes[0, 1].item() == 3  # 2.504 / 1.003 would round to 2


def test_halves_round_to_even_and_extremes_clip() -> None:
    scale = torch.ones(1, 1, dtype=torch.bfloat16)
    weight = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 99.0, -99.0, 0.0]])
    assert grid.encode(weight, scale).tolist() == [[0, 2, 2, 0, -2, 7, -8, 0]]


def test_a_group_of_zeros_is_coded_as_zeros() -> None:
    codes, scale = grid.rtn_quantize(torch.zeros(2, 8), SCHEME)
    assert not codes.any() and bool((scale == 1).all())


def test_straight_through_gradient_is_identity_even_where_clipped() -> None:
    weight = torch.tensor([[100.0, -100.0, 0.3, 0.0, 1.0, 2.0, 3.0, 4.0]], requires_grad=True)
    scale = torch.ones(1, 1, dtype=torch.bfloat16)
    upstream = drawn(3, 1, 8)
    (grid.fake_quantize(weight, scale) * upstream).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, upstream)


@pytest.mark.parametrize("scheme", [{**SCHEME, "bits": 8}, {**SCHEME, "symmetric": False}])
def test_other_schemes_are_refused(scheme: dict[str, object]) -> None:
    with pytest.raises(QdcError, match="only symmetric INT4"):
        grid.rtn_quantize(torch.ones(1, 8), scheme)


def test_columns_that_do_not_divide_into_groups_are_refused() -> None:
    with pytest.raises(QdcError, match="do not divide"):
        grid.rtn_quantize(torch.ones(1, 12), SCHEME)


def test_packing_has_the_published_words() -> None:
    low = torch.arange(-8, 0, dtype=torch.int8)[None]
    high = torch.arange(0, 8, dtype=torch.int8)[None]
    assert packing.pack_codes(low).tolist() == [[1985229328]]
    assert packing.pack_codes(high).tolist() == [[-19088744]]


@given(shapes, seeds)
def test_unpacking_gives_back_every_code(shape: tuple[int, int], seed: int) -> None:
    codes = drawn_codes(seed, shape[0], 8 * shape[1])
    packed = packing.pack_codes(codes)
    assert packed.dtype == torch.int32 and packed.shape == shape
    assert torch.equal(packing.unpack_codes(packed), codes)
    assert torch.equal(packed, pack_to_int32(codes, 4))


@given(shapes, seeds)
def test_the_decoder_agrees_with_that_of_compressed_tensors(shape: tuple[int, int], seed: int) -> None:
    words = torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(seed))
    packed = words.to(torch.int32)
    theirs = unpack_from_int32(packed, 4, torch.Size((shape[0], 8 * shape[1])))
    assert torch.equal(packing.unpack_codes(packed), theirs)


def test_ignore_patterns_split_modules_and_must_match() -> None:
    names = ["lm_head", "model.layers.0.a", "model.layers.0.conv1d"]
    quantized, ignored = packing.split_modules(names, ["lm_head", "re:.*conv1d$"])
    assert quantized == ["model.layers.0.a"] and ignored == ["lm_head", "model.layers.0.conv1d"]
    with pytest.raises(QdcError, match="names no module"):
        packing.split_modules(names, ["re:.*visual.*"])
    assert not packing.matches("model.lm_head", "lm_head")


@settings(max_examples=20)
@given(seeds)
def test_gptq_with_white_inputs_and_no_damping_is_rounding_to_nearest(seed: int) -> None:
    weight = drawn(seed, 3, 24)
    codes, scale = gptq_quantize(weight, torch.eye(24), SCHEME, 0.0)
    expected = grid.rtn_quantize(weight, SCHEME)
    assert torch.equal(codes, expected[0]) and torch.equal(scale, expected[1])


@settings(max_examples=10)
@given(seeds)
def test_gptq_beats_rounding_on_correlated_inputs(seed: int) -> None:
    hessian = Hessian(32)
    hessian.add(drawn(seed, 256, 4) @ drawn(seed + 1, 4, 32) + 0.1 * drawn(seed + 2, 256, 32))
    weight = drawn(seed + 3, 16, 32)
    plain = output_error(weight, grid.decode(*grid.rtn_quantize(weight, SCHEME)), hessian.total)
    better = output_error(weight, grid.decode(*gptq_quantize(weight, hessian.total, SCHEME, 0.01)), hessian.total)
    assert hessian.rows == 256 and better < plain


def test_gptq_codes_a_column_that_is_never_fed_as_zero() -> None:
    inputs = drawn(0, 64, 8)
    inputs[:, 3] = 0
    hessian = Hessian(8)
    hessian.add(inputs)
    codes, _ = gptq_quantize(drawn(1, 4, 8), hessian.total, SCHEME, 0.01)
    assert not codes[:, 3].any() and codes.any()


def test_gptq_refuses_a_singular_hessian() -> None:
    with pytest.raises(QdcError, match="positive definite"):
        gptq_quantize(drawn(1, 4, 8), torch.ones(8, 8), SCHEME, 0.0)
