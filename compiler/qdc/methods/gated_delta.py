"""The gated delta rule and its short convolution, in a form that is quick on a CPU.

The usual form solves a triangular system a chunk, which on small batches costs half of a training step and,
when cores are shared, far more. Here the inverse of the unit lower triangular system is built by block doubling
(a handful of batched matrix products, as stable as forward substitution) with its own backward. This module
knows tensors only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

CHUNK = 32


def _level_mask(size: int, block: int, device: torch.device) -> torch.Tensor:
    """1 where a row lies in the second and a column in the first half of the same `2 * block` block."""
    index = torch.arange(size, device=device)
    same = (index[:, None] // (2 * block)) == (index[None, :] // (2 * block))
    lower = ((index[:, None] // block) % 2 == 1) & ((index[None, :] // block) % 2 == 0)
    return (same & lower).to(torch.float32)


def _unit_lower_inverse(strictly_lower: torch.Tensor) -> torch.Tensor:
    """(I + A)^-1 for A strictly lower triangular, [..., n, n] with n a power of two.

    With inverse T of the diagonal blocks and C the blocks between them, the next level is T - T C T.
    """
    size = strictly_lower.shape[-1]
    inverse = torch.eye(size, dtype=strictly_lower.dtype, device=strictly_lower.device)
    inverse = inverse - strictly_lower * _level_mask(size, 1, strictly_lower.device).to(strictly_lower)
    block = 2
    while block < size:
        between = strictly_lower * _level_mask(size, block, strictly_lower.device).to(strictly_lower)
        inverse = inverse - inverse @ (between @ inverse)
        block *= 2
    return inverse


class UnitLowerInverse(torch.autograd.Function):  # type: ignore[misc]
    """(I + A)^-1, whose gradient is -T' G T' (two products instead of the whole chain backwards)."""

    @staticmethod
    def forward(context: Any, strictly_lower: torch.Tensor) -> torch.Tensor:
        with torch.autocast(strictly_lower.device.type, enabled=False):
            inverse = _unit_lower_inverse(strictly_lower.float())
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
    decay: torch.Tensor,
    rate: torch.Tensor,
    state: torch.Tensor | None = None,
    chunk_size: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule (Yang et al., Gated DeltaNet, section 3) in FP32, chunk by chunk.

    Under autocast its products are rounded like any other; the inverse and the decays stay FP32.

    `query`, `key` [B, T, H, k], normalised here; `value` [B, T, H, v]; `decay` (log, <= 0) and `rate` (beta)
    [B, T, H]. Returns the output [B, T, H, v] in `query`'s dtype and the final state [B, H, k, v] in FP32.
    """
    kind, length = query.dtype, query.shape[1]
    query, key, value = (x.transpose(1, 2).float() for x in (query, key, value))
    decay, rate = (x.transpose(1, 2).float() for x in (decay, rate))
    query, key = _normalised(query) * query.shape[-1] ** -0.5, _normalised(key)
    padding = -length % chunk_size
    if padding:
        query, key, value = (F.pad(x, (0, 0, 0, padding)) for x in (query, key, value))
        decay, rate = (F.pad(x, (0, padding)) for x in (decay, rate))
    query, key, value = (x.unflatten(2, (-1, chunk_size)) for x in (query, key, value))
    decay, rate = (x.unflatten(2, (-1, chunk_size)) for x in (decay, rate))

    total = decay.cumsum(dim=-1)
    pairwise = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    key_rate = key * rate.unsqueeze(-1)
    transposed = key.transpose(-1, -2)
    system = (key_rate @ transposed * pairwise).tril(-1)
    inverse: torch.Tensor = UnitLowerInverse.apply(system)
    grown = total.exp().unsqueeze(-1)
    if state is None:
        state = query.new_zeros(*query.shape[:2], key.shape[-1], value.shape[-1])
    output, state = _scan(
        query * grown,
        key * (total[..., -1:] - total).exp().unsqueeze(-1),
        inverse @ (value * rate.unsqueeze(-1)),
        inverse @ (key_rate * grown),
        (query @ transposed) * pairwise,
        total[..., -1].exp()[..., None, None],
        state.float(),
    )
    output = output.flatten(2, 3)[:, :, :length].transpose(1, 2)
    return output.to(kind), state


def gated_delta_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same rule for one token (T = 1) after `state`: same arguments and results as the chunked form."""
    kind = query.dtype
    query, key, value, decay, rate = (x[:, 0].float() for x in (query, key, value, decay, rate))
    query, key = _normalised(query) * query.shape[-1] ** -0.5, _normalised(key)
    state = state * decay.exp()[..., None, None]
    known = (key.unsqueeze(-2) @ state).squeeze(-2)
    state = state + key.unsqueeze(-1) * ((value - known) * rate.unsqueeze(-1)).unsqueeze(-2)
    output = (query.unsqueeze(-2) @ state).squeeze(-2)
    return output.unsqueeze(1).to(kind), state


def causal_conv1d(
    hidden: torch.Tensor, weight: torch.Tensor, window: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Depthwise causal convolution with SiLU, as shifted multiply-adds, and the window that comes next.

    `hidden` [B, C, T], `weight` [C, width]; `window` [B, C, width - 1]: the inputs before these (zeros if none).
    """
    length, width = hidden.shape[-1], weight.shape[-1]
    padded = F.pad(hidden, (width - 1, 0)) if window is None else torch.cat((window, hidden), dim=-1)
    output = padded[..., :length] * weight[:, :1]
    for shift in range(1, width):
        output = output + padded[..., shift : shift + length] * weight[:, shift : shift + 1]
    return F.silu(output), padded[..., length:]
