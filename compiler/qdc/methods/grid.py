"""The quantization grid: codes x scales. The only place where weights become codes and codes become weights.

PTQ, QAD, packing and the drafter all call these functions, so that a weight has one code everywhere.
Symmetric INT4 without zero points: code q in [-8, 7]; weight = BF16(q * scale); scale BF16, one a group of
columns. Source: compressed-tensors `pack-quantized` as vLLM 0.32 serves it.
"""

from __future__ import annotations

from typing import Any

import torch

from qdc.core.errors import COULD_NOT, QdcError

SMALLEST_SCALE = 2.0**-126


def check_scheme(scheme: dict[str, Any], columns: int | None = None) -> None:
    """Raises QdcError unless the scheme is symmetric INT4 and `columns` divides into whole groups and words."""
    if scheme.get("bits") != 4 or scheme.get("symmetric") is not True:
        raise QdcError("methods.grid.scheme", f"only symmetric INT4 is known, not {scheme}", exit_code=COULD_NOT)
    if columns is not None and (columns % int(scheme["group_size"]) or columns % 8):
        raise QdcError(
            "methods.grid.groups",
            f"{columns} columns do not divide into groups of {scheme['group_size']} and words of 8",
            exit_code=COULD_NOT,
        )


def limits(bits: int) -> tuple[int, int]:
    """The smallest and the largest code: (-8, 7) for four bits."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def absmax_scale(weight: torch.Tensor, group_size: int, bits: int = 4) -> torch.Tensor:
    """BF16 scale [out, in / group_size] of `weight` [out, in]: largest magnitude / largest code.

    A group of zeros gets scale 1. The scale is rounded to BF16 here, before anything is coded against it.
    """
    peak = weight.float().unflatten(-1, (-1, group_size)).abs().amax(dim=-1)
    scale = (peak / limits(bits)[1]).clamp(min=SMALLEST_SCALE)
    return torch.where(peak > 0, scale, torch.ones_like(scale)).to(torch.bfloat16)


def _spread(scale: torch.Tensor, columns: int) -> torch.Tensor:
    return scale.float().repeat_interleave(columns // scale.shape[-1], dim=-1)


def encode(weight: torch.Tensor, scale: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Codes int8 [out, in]: round half to even of weight / scale in FP32, clipped."""
    low, high = limits(bits)
    ratio = weight.float() / _spread(scale, weight.shape[-1])
    return ratio.round().clamp(low, high).to(torch.int8)


def decode(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The served weight, BF16 [out, in]: the product in FP32, rounded once."""
    return (codes.float() * _spread(scale, codes.shape[-1])).to(torch.bfloat16)


class _StraightThrough(torch.autograd.Function):  # type: ignore[misc]
    """Forward: the served weight. Backward: identity, for clipped weights too."""

    @staticmethod
    def forward(_context: Any, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return decode(encode(weight, scale), scale).to(weight.dtype)

    @staticmethod
    def backward(_context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def fake_quantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`decode(encode(weight))` in `weight`'s dtype, with a straight-through gradient; `scale` gets none."""
    quantized: torch.Tensor = _StraightThrough.apply(weight, scale)
    return quantized


def rtn_quantize(weight: torch.Tensor, scheme: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to nearest: (codes int8 [out, in], scale BF16 [out, in / group_size])."""
    check_scheme(scheme, weight.shape[-1])
    scale = absmax_scale(weight, int(scheme["group_size"]), int(scheme["bits"]))
    return encode(weight, scale, int(scheme["bits"])), scale
