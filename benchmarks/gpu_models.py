"""Checkpoints at Qwen3.5-4B's true shapes with random weights, and the drafter as it is trained, in FP32.

For `gpu_patches.py`. The target is a config.json alone: its weights are made up in the engine. The drafter is real
files: W4 (group 128, symmetric, by this project's grid and packing) and its dequantized BF16 twin. Knows no engine.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from qdc.formats import compressed_tensors, dflash, qwen35
from qdc.methods import grid, packing
from qdc.methods.dflash import Drafter, DrafterShape

WINDOW = 1024
K = 15
MASK = 248070
VOCAB = 248320
SCHEME = {"bits": 4, "group_size": 128, "symmetric": True}
SHAPE: dict[str, Any] = {
    "kind": "dflash",
    "layers": 5,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "draft_block_size": 16,
    "taps": [1, 8, 15, 22, 29],
    "mask_token_id": MASK,
    "rope_theta": 1e7,
    "max_position_embeddings": 262144,
}
EPSILON = 1e-6
DRAFTERS = ("w4", "w4-window", "bf16", "bf16-window")


def target_config() -> dict[str, Any]:
    """config.json of a W4A16 target, group 32, with the layers and sizes of Qwen3.5-4B."""
    text = {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attn_output_gate": True,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "max_position_embeddings": 262144,
        "rms_norm_eps": EPSILON,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "eos_token_id": 248044,
    }
    ignored = ["lm_head", r"re:.*linear_attn\.in_proj_[ab]$", r"re:.*conv1d$", r"re:.*mtp.*"]
    packed = compressed_tensors.quantization_config({**SCHEME, "group_size": 32}, ignored)
    return qwen35.whole_of({**text, "quantization_config": packed})


def drafter_config(window: int | None, quantization: dict[str, Any] | None) -> dict[str, Any]:
    return dflash.drafter_config(
        SHAPE,
        target_layers=32,
        vocab_size=VOCAB,
        mask_token_id=MASK,
        window=window,
        quantization=quantization,
    )


def linear_shapes() -> dict[str, tuple[int, int]]:
    """(out, in) of the drafter's 36 Linears by name."""
    hidden, inner, width = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["head_dim"]
    queries, keys = SHAPE["heads"] * width, SHAPE["kv_heads"] * width
    by_end = {
        "fc": (hidden, hidden * len(SHAPE["taps"])),
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    return {name: by_end[name.rsplit(".", 1)[-1]] for name in dflash.linear_modules(SHAPE["layers"])}


def norm_shapes() -> dict[str, int]:
    """Width of each of the drafter's norms by name."""
    hidden, width = SHAPE["hidden_size"], SHAPE["head_dim"]
    norms = {"hidden_norm": hidden, "norm": hidden}
    for layer in range(SHAPE["layers"]):
        norms |= {f"layers.{layer}.{name}": hidden for name in ("input_layernorm", "post_attention_layernorm")}
        norms |= {f"layers.{layer}.self_attn.{name}": width for name in ("q_norm", "k_norm")}
    return norms


def make(work: Path) -> dict[str, Any]:
    """Write the folders `target` and DRAFTERS under `work`; what was written, in numbers."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(20)
    packed: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    for name, width in norm_shapes().items():
        noise = torch.randn(width, generator=generator, device=device)
        packed[f"{name}.weight"] = dense[f"{name}.weight"] = (1 + 0.1 * noise).to(torch.bfloat16).cpu()
    for name, shape in linear_shapes().items():
        weight = (0.02 * torch.randn(shape, generator=generator, device=device)).to(torch.bfloat16).cpu()
        scale = grid.absmax_scale(weight, SCHEME["group_size"])
        codes = grid.encode(weight, scale)
        packed |= packing.packed_tensors(name, codes, scale)
        dense[f"{name}.weight"] = grid.decode(codes, scale)
        dense[f"{name}.original"] = weight
    original = {name: dense.pop(name) for name in list(dense) if name.endswith(".original")}
    for folder, tensors in (("w4", packed), ("bf16", dense)):
        for window in (None, WINDOW):
            path = work / (folder if window is None else f"{folder}-window")
            path.mkdir(parents=True, exist_ok=True)
            config = drafter_config(window, {"scheme": SCHEME, "ignore": []} if folder == "w4" else None)
            (path / "config.json").write_text(json.dumps(config, indent=1))
            if window is None:
                save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
            else:
                (path / "model.safetensors").unlink(missing_ok=True)
                (path / "model.safetensors").hardlink_to(work / folder / "model.safetensors")
    save_file(original, work / "original.safetensors")
    (work / "target").mkdir(exist_ok=True)
    (work / "target/config.json").write_text(json.dumps(target_config(), indent=1))
    sizes = {folder: (work / folder / "model.safetensors").stat().st_size for folder in ("w4", "bf16")}
    return {"parameters": sum(t.numel() for t in dense.values()), "bytes": sizes, "free": shutil.disk_usage(work).free}


def is_made(work: Path) -> bool:
    return (work / "target/config.json").exists()


def read(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def context_weight(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """k and v of all layers as the engine stacks them, dequantized from packed tensors: BF16 [layers * 2 * kv, in]."""
    parts = []
    for layer in range(SHAPE["layers"]):
        for name in ("k_proj", "v_proj"):
            module = f"layers.{layer}.self_attn.{name}"
            codes = packing.unpack_codes(tensors[f"{module}.weight_packed"])
            parts.append(grid.decode(codes, tensors[f"{module}.weight_scale"]))
    return torch.cat(parts)


def reference(weights: dict[str, torch.Tensor]) -> Drafter:
    """The drafter as it is trained here, in FP32, with `weights` by name."""
    device = next(iter(weights.values())).device
    with torch.device(device):
        drafter = Drafter(DrafterShape.from_config(drafter_config(None, None)))
    drafter.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return drafter.requires_grad_(False).eval()


@torch.no_grad()
def drafted(drafter: Drafter, taps: torch.Tensor, embedded: torch.Tensor, window: int | None) -> torch.Tensor:
    """Hidden states of the K masks before the head, FP32 [K, hidden], with a dense mask.

    `taps` [n, 5 * hidden] of the n context tokens; `embedded` [2, hidden]: the anchor's embedding and the mask's.
    """
    block = torch.cat([embedded[:1], embedded[1:].expand(K, -1)])
    anchors = torch.tensor([[len(taps)]], device=taps.device)
    return drafter(taps[None], block[None], anchors, K + 1, window)[0, 1:].cpu()
