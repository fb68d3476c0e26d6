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


@dataclass(frozen=True)
class Rotary:
    """FP32 tables of T positions, [B or 1, 1, T, head_dim]; the first half of the sine is negated (`rotate`)."""

    cos: Tensor
    sin: Tensor


def rotary(positions: Tensor, head_dim: int, theta: float) -> Rotary:
    """Tables for positions [B or 1, T], halves repeated (neox order)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angle = positions.float().unsqueeze(-1) * (1.0 / theta**exponent)
    cos, sin = angle.cos(), angle.sin()
    return Rotary(torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1))


def rotate(x: Tensor, table: Rotary) -> Tensor:
    """RoPE on x [B, heads, T, head_dim]; FP32 inside, x's dtype out."""
    return (x * table.cos + x.roll(x.shape[-1] // 2, dims=-1) * table.sin).to(x.dtype)


@dataclass(frozen=True)
class View:
    """Where the queries of one forward are and what they see of the context and of their own block.

    `seen` [B, 1, Q, S] and `own` [D, D] (slot by slot) are additive: 0 where seen, -inf elsewhere. A row of
    `own` always sees itself, so that no query sees nothing. Other blocks are never seen.
    """

    query: Rotary
    context: Rotary
    seen: Tensor
    own: Tensor


class Attention(nn.Module):  # type: ignore[misc]
    """Queries from the blocks; keys and values from context and own block through the same projections."""

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

    def forward(self, x: Tensor, context: Tensor, view: View) -> Tensor:
        """`x` [B, Q, hidden], `context` [B, S, hidden] -> [B, Q, hidden]. One softmax over context and block.

        Inside, queries are [B, kv heads, heads a kv head, Q or (A, D), head_dim].
        """
        queries, block = x.shape[1], view.own.shape[-1]
        query = rotate(self.q_norm(self._heads(self.q_proj(x))), view.query) * self.shape.head_dim**-0.5
        query = query.unflatten(1, (self.shape.kv_heads, -1))
        keys = rotate(self.k_norm(self._heads(self.k_proj(context))), view.context)
        own_keys = rotate(self.k_norm(self._heads(self.k_proj(x))), view.query).unflatten(2, (-1, block))
        values = self._heads(self.v_proj(context))
        own_values = self._heads(self.v_proj(x)).unflatten(2, (-1, block))
        of_context = (query.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, (-1, queries))
        of_block = query.unflatten(3, (-1, block)) @ own_keys.transpose(-1, -2).unsqueeze(2)
        scores = torch.cat((of_context + view.seen.unsqueeze(1), (of_block + view.own).flatten(3, 4)), dim=-1)
        shares = scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype)
        from_context, from_block = shares[..., :-block], shares[..., -block:]
        out = (from_context.flatten(2, 3) @ values).unflatten(2, (-1, queries))
        out = out + (from_block.unflatten(3, (-1, block)) @ own_values.unsqueeze(2)).flatten(3, 4)
        projected: Tensor = self.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2))
        return projected


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

    def forward(self, x: Tensor, context: Tensor, view: View) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, view)
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

    def forward(
        self, taps: Tensor, noise: Tensor, anchors: Tensor, draft_block_size: int, window: int | None = None
    ) -> Tensor:
        """Hidden states for the head, [B, A * D, hidden], of the blocks at `anchors` [B, A].

        `taps` [B, S, len(taps) * hidden] of positions 0..S-1; `noise` [B, A * D, hidden]: the target's embedding
        of `block_tokens`. D = `draft_block_size` may be smaller than the trained one (K + 1). `window`: W tokens.
        """
        shape, context = self.shape, self.hidden_norm(self.fc(taps))
        here = torch.arange(taps.shape[1], device=taps.device).unsqueeze(0)
        view = View(
            query=rotary(block_positions(anchors, draft_block_size), shape.head_dim, shape.rope_theta),
            context=rotary(here, shape.head_dim, shape.rope_theta),
            seen=context_mask(anchors, taps.shape[1], draft_block_size, window),
            own=own_mask(draft_block_size, window).to(taps.device),
        )
        x = noise
        for layer in self.layers:
            x = layer(x, context, view)
        out: Tensor = self.norm(x)
        return out


def block_positions(anchors: Tensor, draft_block_size: int) -> Tensor:
    """Positions of every slot: anchors [B, A] -> [B, A * D]; slot j of the block at s is position s + j."""
    slots = torch.arange(draft_block_size, device=anchors.device)
    return (anchors.unsqueeze(-1) + slots).flatten(1)


def context_mask(anchors: Tensor, context: int, draft_block_size: int, window: int | None = None) -> Tensor:
    """Additive mask [B, 1, Q, context]: slot j of the block at s sees positions strictly below s.

    With a window W only those at most W - 1 below its own position s + j.
    """
    start = anchors.repeat_interleave(draft_block_size, dim=1).unsqueeze(-1)
    here = torch.arange(context, device=anchors.device)
    seen = here < start
    if window is not None:
        seen = seen & (block_positions(anchors, draft_block_size).unsqueeze(-1) - here < window)
    return _additive(seen).unsqueeze(1)


def own_mask(draft_block_size: int, window: int | None = None) -> Tensor:
    """Additive mask [D, D]: every slot sees every slot of its block, with a window W those W - 1 away at most."""
    slots = torch.arange(draft_block_size)
    apart = (slots.unsqueeze(-1) - slots).abs()
    return _additive(apart < (draft_block_size if window is None else window))


def _additive(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, float("-inf"))


def block_tokens(anchor_tokens: Tensor, draft_block_size: int, mask_token_id: int) -> Tensor:
    """Input ids of the blocks: [B, A] -> [B, A * D], the anchor token and D - 1 masks each."""
    tokens = anchor_tokens.new_full((*anchor_tokens.shape, draft_block_size), mask_token_id)
    tokens[..., 0] = anchor_tokens
    return tokens.flatten(1)
