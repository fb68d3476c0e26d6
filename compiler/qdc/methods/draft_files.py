"""Drafter folders: config.json and safetensors in, modules out; and what a drafter takes from its target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qdc.core.errors import COULD_NOT, QdcError
from qdc.methods.dflash import Drafter, DrafterShape
from qdc.methods.draft_training import Frozen


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def plain_weights(folder: Path) -> dict[str, Tensor]:
    """BF16 tensors by plain name: model.safetensors, or a quantized drafter's dequantized twin."""
    quantized = "quantization_config" in read_config(folder)
    tensors: dict[str, Tensor] = load_file(folder / ("dense.safetensors" if quantized else "model.safetensors"))
    return tensors


def load_drafter(folder: Path) -> Drafter:
    """The drafter in FP32, holding exactly the folder's BF16 values. Raises QdcError on any name or shape."""
    drafter = Drafter(DrafterShape.from_config(read_config(folder)))
    try:
        drafter.load_state_dict({k: v.float() for k, v in plain_weights(folder).items()}, strict=True)
    except RuntimeError as error:
        raise QdcError(
            "methods.draft_files.weights",
            f"the weights do not fit config.json: {error}",
            file=folder,
            exit_code=COULD_NOT,
        ) from error
    return drafter


def plain_state(drafter: Drafter) -> dict[str, Tensor]:
    """Every tensor in BF16 on the CPU, as it is stored."""
    return {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in sorted(drafter.state_dict().items())}


def save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file, sorted by name."""
    save_file(dict(sorted(tensors.items())), path, metadata={"format": "pt"})
    path.chmod(0o644)


def frozen_parts(model: nn.Module) -> Frozen:
    """The target's embedding and head, which the drafter uses as its own."""
    return Frozen(model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach())


def tokenizer_folder(target: Path, model_folder: str) -> Path:
    """Where a target's tokenizer is: beside the weights, in the packed folder, or at the top."""
    for folder in (target / model_folder, target / "ct", target):
        if (folder / "tokenizer.json").exists() and (folder / "chat_template.jinja").exists():
            return folder
    raise QdcError("methods.draft_files.tokenizer", "no tokenizer", file=target, exit_code=COULD_NOT)
