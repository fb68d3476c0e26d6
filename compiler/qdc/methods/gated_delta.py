"""The gated delta rule and its short convolution, in a form that is quick on a CPU.

Stock transformers solves a triangular system a chunk with `torch.linalg.solve_triangular`, which on small
batches costs half of a training step and, when cores are shared, far more. Here the inverse of the unit lower
triangular system is built by block doubling (a handful of batched matrix products, as stable as forward
substitution) with its own backward. This module knows tensors only; `qwen` puts it in place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

CHUNK = 32


def _level_mask(size: int, block: int) -> torch.Tensor:
    """1 where a row lies in the second and a column in the first half of the same `2 * block` block."""
    index = torch.arange(size)
    same = (index[:, None] // (2 * block)) == (index[None, :] // (2 * block))
    lower = ((index[:, None] // block) % 2 == 1) & ((index[None, :] // block) % 2 == 0)
    return (same & lower).to(torch.float32)


def _unit_lower_inverse(strictly_lower: torch.Tensor) -> torch.Tensor:
    """(I + A)^-1 for A strictly lower triangular, [..., n, n] with n a power of two.

    With inverse T of the diagonal blocks and C the blocks between them, the next level is T - T C T.
    """
    size = strictly_lower.shape[-1]
    inverse = torch.eye(size, dtype=strictly_lower.dtype, device=strictly_lower.device)
    inverse = inverse - strictly_lower * _level_mask(size, 1).to(strictly_lower)
    block = 2
    while block < size:
        between = strictly_lower * _level_mask(size, block).to(strictly_lower)
        inverse = inverse - inverse @ (between @ inverse)
        block *= 2
    return inverse


class UnitLowerInverse(torch.autograd.Function):  # type: ignore[misc]
    """(I + A)^-1, whose gradient is -T' G T' (two products instead of the whole chain backwards)."""

    @staticmethod
    def forward(context: Any, strictly_lower: torch.Tensor) -> torch.Tensor:
        inverse = _unit_lower_inverse(strictly_lower)
        context.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (inverse,) = context.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ gradients[0] @ transposed).tril(-1)


def _normalised(values: torch.Tensor) -> torch.Tensor:
    return values * torch.rsqrt((values * values).sum(dim=-1, keepdim=True) + 1e-6)


def _scan(
    query: torch.Tensor,
    key: torch.Tensor,
    values: torch.Tensor,
    readers: torch.Tensor,
    within: torch.Tensor,
    chunk_decay: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequential part: one step a chunk. Tensors [B, H, chunks, ...]; state [B, H, k, v]."""
    outputs = []
    for index in range(query.shape[2]):
        written = values[:, :, index] - readers[:, :, index] @ state
        outputs.append(query[:, :, index] @ state + within[:, :, index] @ written)
        state = state * chunk_decay[:, :, index] + key[:, :, index].transpose(-1, -2) @ written
    return torch.stack(outputs, dim=2), state


def chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = CHUNK,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **unused: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule (Yang et al., Gated DeltaNet, section 3) in FP32, chunk by chunk.

    `query`, `key` [B, T, H, k]; `value` [B, T, H, v]; `g` (log decay, <= 0) and `beta` [B, T, H].
    Same arguments and results as the function of transformers 5.17 that it replaces: output [B, T, H, v] in
    `query`'s dtype and, if asked for, the final state [B, H, k, v].
    """
    kind, length = query.dtype, query.shape[1]
    with torch.autocast(query.device.type, enabled=False):
        query, key, value = (x.transpose(1, 2).float() for x in (query, key, value))
        decay, beta = (x.transpose(1, 2).float() for x in (g, beta))
        if use_qk_l2norm_in_kernel:
            query, key = _normalised(query), _normalised(key)
        query = query * query.shape[-1] ** -0.5
        padding = -length % chunk_size
        if padding:
            query, key, value = (F.pad(x, (0, 0, 0, padding)) for x in (query, key, value))
            decay, beta = (F.pad(x, (0, padding)) for x in (decay, beta))
        query, key, value = (x.unflatten(2, (-1, chunk_size)) for x in (query, key, value))
        decay, beta = (x.unflatten(2, (-1, chunk_size)) for x in (decay, beta))

        total = decay.cumsum(dim=-1)
        pairwise = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
        key_beta = key * beta.unsqueeze(-1)
        transposed = key.transpose(-1, -2)
        system = (key_beta @ transposed * pairwise).tril(-1)
        inverse: torch.Tensor = UnitLowerInverse.apply(system)
        grown = total.exp().unsqueeze(-1)
        state = query.new_zeros(*query.shape[:2], key.shape[-1], value.shape[-1])
        if initial_state is not None:
            state = initial_state.to(state)
        output, state = _scan(
            query * grown,
            key * (total[..., -1:] - total).exp().unsqueeze(-1),
            inverse @ (value * beta.unsqueeze(-1)),
            inverse @ (key_beta * grown),
            (query @ transposed) * pairwise,
            total[..., -1].exp()[..., None, None],
            state,
        )
        output = output.flatten(2, 3)[:, :, :length].transpose(1, 2)
    return output.to(kind).contiguous(), state if output_final_state else None


def causal_conv1d(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **unused: Any,
) -> torch.Tensor:
    """Depthwise causal convolution as shifted multiply-adds. `hidden_states` [B, C, T], `weight` [C, width]."""
    length, width = hidden_states.shape[-1], weight.shape[-1]
    padded = F.pad(hidden_states, (width - 1, 0))
    output = padded[..., :length] * weight[:, :1]
    for shift in range(1, width):
        output = output + padded[..., shift : shift + length] * weight[:, shift : shift + 1]
    if bias is not None:
        output = output + bias[:, None]
    if activation is None:
        return output
    if activation not in ("silu", "swish"):
        raise ValueError(f"no activation named {activation}")
    return F.silu(output)
