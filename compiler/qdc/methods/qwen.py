"""Qwen3.5 text models: built from sizes, loaded from a Hugging Face folder, run with taps.

The model itself is `qwen_model`; its tensor names are those of transformers' `Qwen3_5ForCausalLM`. This module
knows folders and tensors, not recipes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from qdc.core.errors import COULD_NOT, QdcError
from qdc.formats.qwen35 import ARCHITECTURE
from qdc.methods.qwen_model import Qwen

LEFT_OUT = "left_out.json"


def build_model(config: dict[str, Any], seed: int) -> Qwen:
    """A fresh FP32 model with weights drawn from `seed`, in training mode."""
    torch.manual_seed(seed)
    model = Qwen(config)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv1d | torch.nn.Embedding):
            torch.nn.init.normal_(module.weight, std=float(config["initializer_range"]))
    return model


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder. Raises QdcError unless it is a Qwen3.5 text model."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if ARCHITECTURE not in config.get("architectures", []):
        raise QdcError(
            "methods.qwen.architecture",
            f"the architecture {config.get('architectures')} is not {ARCHITECTURE}",
            file=folder / "config.json",
            exit_code=COULD_NOT,
        )
    return config


def left_out(folder: Path) -> list[str] | None:
    """Modules of the whole model from which a base was taken that are not in it; None for a base that was given so."""
    file = folder / LEFT_OUT
    names: list[str] | None = json.loads(file.read_text()) if file.is_file() else None
    return names


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the folder's safetensors files, as stored."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise QdcError("methods.qwen.weights", "no safetensors file", file=folder, exit_code=COULD_NOT)
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        weights.update(load_file(file))
    return weights


def model_from(
    config: dict[str, Any],
    weights: dict[str, torch.Tensor],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Qwen:
    """A model on `device` in eval mode with exactly these weights, converted to `dtype`; each tensor must be there.

    Raises QdcError on missing or unknown tensor names. `lm_head.weight` may be absent when tied.
    """
    model = Qwen(config)
    values = {name: tensor.to(device, dtype, copy=True) for name, tensor in weights.items()}
    missing, unknown = model.load_state_dict(values, strict=False, assign=True)
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    if set(missing) - tied or unknown:
        raise QdcError(
            "methods.qwen.tensors",
            f"missing tensors {sorted(set(missing) - tied)[:3]}, unknown tensors {sorted(unknown)[:3]}",
            exit_code=COULD_NOT,
        )
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.to(device).eval()
    return model


def load_model(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Qwen:
    """The model of a folder with plain (not packed) weights on `device`, in eval mode, without gradients."""
    return model_from(read_config(folder), read_weights(folder), dtype, device)


def device_of(model: torch.nn.Module) -> torch.device:
    """Where the weights are. Ids, masks and what is drawn stay on the CPU, and go there when they enter a model."""
    return next(model.parameters()).device


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Position ids [B, T] that count only the tokens shown by `attention_mask` [B, T] (left or right padding)."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def forward(model: Qwen, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits [B, T, V] of `input_ids` [B, T]; without a mask every token counts, positions 0..T-1."""
    input_ids, attention_mask = _moved(model, input_ids, attention_mask)
    place = None if attention_mask is None else positions(attention_mask)
    logits: torch.Tensor = model(input_ids, attention_mask, place).logits
    return logits


def _moved(
    model: Qwen, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    device = device_of(model)
    return input_ids.to(device), None if attention_mask is None else attention_mask.to(device)


def forward_taps(
    model: Qwen,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    taps: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B, T, V] and the outputs of decoder layers `taps`, joined: [B, T, len(taps) * hidden].

    Tap i is the residual stream after decoder layer i, counted from 0 (the z-lab convention).
    """
    input_ids, attention_mask = _moved(model, input_ids, attention_mask)
    place = None if attention_mask is None else positions(attention_mask)
    output = model(input_ids, attention_mask, place, output_hidden_states=True)
    return output.logits, torch.cat([output.hidden_states[tap + 1] for tap in taps], dim=-1)
