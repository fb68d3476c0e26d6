"""The DFlash drafter: a small decoder that drafts a whole block at once from the target's hidden states.

Sources: DFlash (block-parallel drafting with injected context) and z-lab's published weights, whose tensor
names are kept. Inputs are the target's taps and the target's embedding of [anchor, mask, ...]; outputs are
hidden states for the target's own head. Knows no tokenizer, no file, no target model.

Shapes: B conversations, S context tokens, A anchors a conversation, D draft block size, Q = A * D queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of a drafter. `taps`: target layers that are read (tap i = residual stream after layer i)."""

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    draft_block_size: int
    taps: tuple[int, ...]
    mask_token_id: int
    rope_theta: float
    rms_norm_eps: float = 1e-6

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DrafterShape:
        """From a drafter's config.json (the form that `formats.dflash.drafter_config` writes)."""
        return cls(
            layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            draft_block_size=config["block_size"],
            taps=tuple(config["dflash_config"]["target_layer_ids"]),
            mask_token_id=config["dflash_config"]["mask_token_id"],
            rope_theta=float(config["rope_theta"]),
            rms_norm_eps=config["rms_norm_eps"],
        )


class RmsNorm(nn.Module):  # type: ignore[misc]
    """x / rms(x) * weight over the last dimension, normalised in FP32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos, sin for positions [...]: FP32 [..., head_dim], halves repeated (neox order)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angle = positions.float().unsqueeze(-1) * (1.0 / theta**exponent)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x [B, heads, T, head_dim] with cos, sin [B or 1, T, head_dim]; FP32 inside, x's dtype out."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos.unsqueeze(1) + turned * sin.unsqueeze(1)).to(x.dtype)


class Attention(nn.Module):  # type: ignore[misc]
    """Queries from the blocks; keys and values from context and blocks through the same projections."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=False)
        self.q_norm = RmsNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RmsNorm(shape.head_dim, shape.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, context: Tensor, turn: Turn, mask: Tensor) -> Tensor:
        query = rotate(self.q_norm(self._heads(self.q_proj(x))), turn.query_cos, turn.query_sin)
        keys = torch.cat((self._heads(self.k_proj(context)), self._heads(self.k_proj(x))), dim=2)
        keys = rotate(self.k_norm(keys), turn.key_cos, turn.key_sin)
        values = torch.cat((self._heads(self.v_proj(context)), self._heads(self.v_proj(x))), dim=2)
        keys, query = keys.to(values.dtype), query.to(values.dtype)
        out = F.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=mask.to(query.dtype),
            enable_gqa=self.shape.heads != self.shape.kv_heads,
        )
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


@dataclass(frozen=True)
class Turn:
    """Rotary tables of one forward: queries [B, Q, head_dim]; context, then blocks [B, S + Q, head_dim]."""

    query_cos: Tensor
    query_sin: Tensor
    key_cos: Tensor
    key_sin: Tensor


class Mlp(nn.Module):  # type: ignore[misc]
    """SiLU-gated."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):  # type: ignore[misc]
    """x + o(attention(norm(x), context)), then + mlp(norm(x)). The context is not normalised again."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, turn: Turn, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, turn, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Drafter(nn.Module):  # type: ignore[misc]
    """Has neither embedding nor head: both are the target's."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.taps) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def initialise(self, spread: float, generator: torch.Generator) -> None:
        """Every matrix from N(0, spread^2), in name order; norms 1."""
        for _, parameter in sorted(self.named_parameters()):
            with torch.no_grad():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, spread, generator=generator)
                else:
                    parameter.fill_(1.0)

    def forward(self, taps: Tensor, noise: Tensor, query_positions: Tensor, mask: Tensor) -> Tensor:
        """Hidden states for the head, [B, Q, hidden].

        `taps` [B, S, len(taps) * hidden] of positions 0..S-1; `noise` [B, Q, hidden] the target's embedding
        of the blocks; `query_positions` [B, Q]; `mask` additive [B, 1, Q, S + Q] (`block_mask`).
        """
        context = self.hidden_norm(self.fc(taps))
        shape = self.shape
        query_cos, query_sin = rotary(query_positions, shape.head_dim, shape.rope_theta)
        here = torch.arange(taps.shape[1], device=taps.device).unsqueeze(0)
        cos, sin = (table.expand(len(taps), -1, -1) for table in rotary(here, shape.head_dim, shape.rope_theta))
        turn = Turn(query_cos, query_sin, torch.cat((cos, query_cos), 1), torch.cat((sin, query_sin), 1))
        x = noise
        for layer in self.layers:
            x = layer(x, context, turn, mask)
        out: Tensor = self.norm(x)
        return out


def block_positions(anchors: Tensor, draft_block_size: int) -> Tensor:
    """Positions of every slot: anchors [B, A] -> [B, A * D]; slot j of the block at s is position s + j."""
    slots = torch.arange(draft_block_size, device=anchors.device)
    return (anchors.unsqueeze(-1) + slots).flatten(1)


def block_mask(anchors: Tensor, context: int, draft_block_size: int, window: int | None = None) -> Tensor:
    """Additive mask [B, 1, Q, context + Q] of parallel blocks: 0 where seen, -inf elsewhere.

    A query of the block at anchor s sees the context strictly below s and all slots of its own block,
    nothing of other blocks. With a window W it sees only keys whose position differs from its own by at most
    W - 1.
    """
    positions = block_positions(anchors, draft_block_size)
    queries = positions.shape[1]
    start = anchors.repeat_interleave(draft_block_size, dim=1)
    below = torch.arange(context, device=anchors.device).view(1, 1, -1)
    seen_context = below < start.unsqueeze(-1)
    block = torch.arange(queries, device=anchors.device) // draft_block_size
    seen_block = (block.view(-1, 1) == block.view(1, -1)).unsqueeze(0).expand(len(anchors), -1, -1)
    if window is not None:
        seen_context = seen_context & (positions.unsqueeze(-1) - below < window)
        apart = (positions.unsqueeze(-1) - positions.unsqueeze(1)).abs()
        seen_block = seen_block & (apart < window)
    seen = torch.cat((seen_context, seen_block), dim=-1)
    return torch.zeros(seen.shape).to(anchors.device).masked_fill(~seen, float("-inf")).unsqueeze(1)


def block_tokens(anchor_tokens: Tensor, draft_block_size: int, mask_token_id: int) -> Tensor:
    """Input ids of the blocks: [B, A] -> [B, A * D], the anchor token and D - 1 masks each."""
    tokens = anchor_tokens.new_full((*anchor_tokens.shape, draft_block_size), mask_token_id)
    tokens[..., 0] = anchor_tokens
    return tokens.flatten(1)
