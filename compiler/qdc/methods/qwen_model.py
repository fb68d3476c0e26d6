"""Qwen3.5's text decoder in plain torch: gated attention and gated delta-rule layers, as transformers 5.17 has it.

Written out here, and not imported, because a stage is a process and the import of transformers costs several
seconds each time, and because its reference kernels are slow on a CPU. Tests hold it to transformers' logits,
gradients and tensor names. Knows tensors only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qdc.methods.gated_delta import causal_conv1d, chunk_gated_delta_rule, gated_delta_step


@dataclass
class Cache:
    """What each layer keeps between calls: (keys, values) or (convolution window, recurrent state)."""

    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass
class Output:
    """`logits` [B, T, V]; `hidden_states`: the embedding and each layer's output, if asked for; the cache."""

    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None
    cache: Cache | None


class Norm(nn.Module):  # type: ignore[misc]
    """RMS norm in FP32 whose stored weight is the gain less one."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class GatedNorm(nn.Module):  # type: ignore[misc]
    """RMS norm, then a SiLU gate; its stored weight is the gain itself."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return ((self.weight * wide.to(x.dtype)) * F.silu(gate.float())).to(x.dtype)


class Linear(nn.Linear):  # type: ignore[misc]
    """Whose weights start as whatever memory holds: they are always drawn or loaded by the caller."""

    def reset_parameters(self) -> None:
        """Nothing."""


class Conv1d(nn.Conv1d):  # type: ignore[misc]
    """Likewise."""

    def reset_parameters(self) -> None:
        """Nothing."""


class Embedding(nn.Embedding):  # type: ignore[misc]
    """Likewise."""

    def reset_parameters(self) -> None:
        """Nothing."""


def _linear(inputs: int, outputs: int) -> Linear:
    return Linear(inputs, outputs, bias=False)


class GatedDeltaNet(nn.Module):  # type: ignore[misc]
    """Linear attention: short convolution, gated delta rule, gated norm."""

    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        hidden, self.index = config["hidden_size"], index
        self.key_heads, self.value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        self.key_dim, self.value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        channels = 2 * keys + values
        self.sizes = [keys, keys, values]
        width = config["linear_conv_kernel_dim"]
        self.conv1d = Conv1d(channels, channels, width, groups=channels, padding=width - 1, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(self.value_heads))
        self.A_log = nn.Parameter(torch.empty(self.value_heads).uniform_(0.01, 16).log())
        self.norm = GatedNorm(self.value_dim, config["rms_norm_eps"])
        self.in_proj_qkv = _linear(hidden, channels)
        self.in_proj_z = _linear(hidden, values)
        self.in_proj_b = _linear(hidden, self.value_heads)
        self.in_proj_a = _linear(hidden, self.value_heads)
        self.out_proj = _linear(values, hidden)

    def forward(self, x: Tensor, shown: Tensor | None, cache: Cache | None) -> Tensor:
        if shown is not None:
            x = (x * shown[..., None]).to(x.dtype)
        window, state = (None, None) if cache is None else cache.layers.get(self.index, (None, None))
        mixed = self.in_proj_qkv(x).transpose(1, 2)
        convolved, window = causal_conv1d(mixed, self.conv1d.weight.squeeze(1), window)
        query, key, value = convolved.transpose(1, 2).split(self.sizes, dim=-1)
        query = query.unflatten(-1, (self.key_heads, self.key_dim))
        key = key.unflatten(-1, (self.key_heads, self.key_dim))
        value = value.unflatten(-1, (self.value_heads, self.value_dim))
        repeats = self.value_heads // self.key_heads
        if repeats > 1:
            query, key = query.repeat_interleave(repeats, 2), key.repeat_interleave(repeats, 2)
        decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        rate = self.in_proj_b(x).sigmoid()
        rule = gated_delta_step if state is not None and x.shape[1] == 1 else chunk_gated_delta_rule
        read, state = rule(query, key, value, decay, rate, state)
        if cache is not None:
            cache.layers[self.index] = (window, state)
        gate = self.in_proj_z(x).unflatten(-1, (self.value_heads, self.value_dim))
        output: Tensor = self.out_proj(self.norm(read, gate).flatten(-2))
        return output


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions on the first dimensions of [B, heads, T, dim]; `cosine`, `sine` [B, 1, T, rotary]."""
    rotary = cosine.shape[-1]
    turned, rest = x[..., :rotary], x[..., rotary:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cosine + torch.cat((-second, first), dim=-1) * sine
    return torch.cat((turned, rest), dim=-1)


class GatedAttention(nn.Module):  # type: ignore[misc]
    """Grouped-query attention with normed queries and keys and a sigmoid gate on its output."""

    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        hidden, self.index = config["hidden_size"], index
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.q_proj = _linear(hidden, 2 * self.heads * self.head_dim)
        self.k_proj = _linear(hidden, self.kv_heads * self.head_dim)
        self.v_proj = _linear(hidden, self.kv_heads * self.head_dim)
        self.o_proj = _linear(self.heads * self.head_dim, hidden)
        self.q_norm = Norm(self.head_dim, config["rms_norm_eps"])
        self.k_norm = Norm(self.head_dim, config["rms_norm_eps"])

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], visible: Tensor | None, cache: Cache | None) -> Tensor:
        query, gate = self.q_proj(x).unflatten(-1, (self.heads, 2 * self.head_dim)).chunk(2, dim=-1)
        key = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        value = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        query = _rotate(self.q_norm(query).transpose(1, 2), *rotary)
        key = _rotate(self.k_norm(key).transpose(1, 2), *rotary)
        if cache is not None:
            if self.index in cache.layers:
                before = cache.layers[self.index]
                key, value = torch.cat((before[0], key), dim=2), torch.cat((before[1], value), dim=2)
            cache.layers[self.index] = (key, value)
        repeats = self.heads // self.kv_heads
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        read = F.scaled_dot_product_attention(
            query.type_as(value), key.type_as(value), value, attn_mask=visible, is_causal=visible is None
        )
        output: Tensor = self.o_proj((read.transpose(1, 2) * gate.sigmoid()).flatten(-2))
        return output


class Mlp(nn.Module):  # type: ignore[misc]
    """SiLU-gated feed-forward layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, wide = config["hidden_size"], config["intermediate_size"]
        self.gate_proj, self.up_proj = _linear(hidden, wide), _linear(hidden, wide)
        self.down_proj = _linear(wide, hidden)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Layer(nn.Module):  # type: ignore[misc]
    """One decoder layer; its output is the residual stream."""

    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        self.linear = config["layer_types"][index] == "linear_attention"
        if self.linear:
            self.linear_attn = GatedDeltaNet(config, index)
        else:
            self.self_attn = GatedAttention(config, index)
        self.mlp = Mlp(config)
        self.input_layernorm = Norm(config["hidden_size"], config["rms_norm_eps"])
        self.post_attention_layernorm = Norm(config["hidden_size"], config["rms_norm_eps"])

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        shown: Tensor | None,
        visible: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        normed = self.input_layernorm(x)
        if self.linear:
            x = x + self.linear_attn(normed, shown, cache)
        else:
            x = x + self.self_attn(normed, rotary, visible, cache)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class Decoder(nn.Module):  # type: ignore[misc]
    """Embedding, layers and final norm: the final hidden states."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config["num_hidden_layers"]))
        self.norm = Norm(config["hidden_size"], config["rms_norm_eps"])

    def _rotary(self, positions: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        rope = self.config["rope_parameters"]
        size = int(self.config["head_dim"] * rope.get("partial_rotary_factor", 1.0))
        powers = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size
        angles = positions[:, None, :, None].float() / (float(rope["rope_theta"]) ** powers)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(kind), angles.sin().to(kind)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        seen: list[Tensor] | None = None,
    ) -> Tensor:
        x = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        rotary = self._rotary(position_ids, x.dtype)
        shown = None if attention_mask is None or x.shape[1] == 1 else attention_mask[:, -x.shape[1] :]
        visible = None if attention_mask is None else _visible(attention_mask, x.shape[1])
        for layer in self.layers:
            if seen is not None:
                seen.append(x)
            x = layer(x, rotary, shown, visible, cache)
        if seen is not None:
            seen.append(x)
        output: Tensor = self.norm(x)
        return output


def _visible(attention_mask: Tensor, queries: int) -> Tensor:
    """Bool [B, 1, queries, T]: key shown and not later than the query; each position sees itself, padding too."""
    keys = attention_mask.shape[1]
    place = torch.arange(keys, device=attention_mask.device)
    asked = place[keys - queries :, None]
    shown = attention_mask.bool()[:, None, None, :] & (place[None, :] <= asked)
    return shown | (place[None, :] == asked)


class Qwen(nn.Module):  # type: ignore[misc]
    """The whole model. `config`: the values of its config.json."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = _linear(config["hidden_size"], config["vocab_size"])
        if config.get("tie_word_embeddings"):
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool = False,
        output_hidden_states: bool = False,
        last_only: bool = False,
    ) -> Output:
        """With a mask, `position_ids` must be given too. With a cache, `attention_mask` covers cached tokens."""
        if use_cache and cache is None:
            cache = Cache()
        seen: list[Tensor] | None = [] if output_hidden_states else None
        hidden = self.model(input_ids, attention_mask, position_ids, cache, seen)
        logits = self.lm_head(hidden[:, -1:] if last_only else hidden)
        return Output(logits, None if seen is None else tuple(seen), cache)
