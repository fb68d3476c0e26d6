"""Tiny targets and drafters in the conventions that published checkpoints use, and how each of them can lie.

A target has 64 hidden units, 2 layers of attention and MLP, 64 tokens. Every value is made up; shapes, names and
configurations are those of the convention. `declared` is merged into what config.json says of quantization.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from audit_fixtures.pieces import pretty
from qdc.formats import int4, safetensors

Tensors = dict[str, tuple[str, list[int], bytes]]
HIDDEN, WIDE, VOCABULARY, LAYERS = 64, 128, 64, 2
LINEARS = {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128),
}  # fmt: skip
TEMPLATE = (
    b"{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
)


def plain(name: str, *shape: int) -> Tensors:
    count = 2
    for size in shape:
        count *= size
    return {f"{name}.weight": ("BF16", list(shape), bytes(count))}


def packed(name: str, rows: int, columns: int, group: int, bits: int = 4, symmetric: bool = True) -> Tensors:
    """compressed-tensors `pack-quantized`: codes packed along the inputs."""
    words = columns * bits // 32
    row = struct.pack("<8i", *int4.pack([column % 16 - 8 for column in range(64)]))
    groups = columns // group
    tensors: Tensors = {
        f"{name}.weight_packed": ("I32", [rows, words], (row * (rows * words))[: rows * words * 4]),
        f"{name}.weight_scale": ("BF16", [rows, groups], b"\x80\x3c" * (rows * groups)),
        f"{name}.weight_shape": ("I64", [2], struct.pack("<2q", rows, columns)),
    }
    if not symmetric:
        tensors[f"{name}.weight_zero_point"] = ("I32", [rows * bits // 32, groups], bytes(rows * bits // 8 * groups))
    return tensors


def awq(name: str, rows: int, columns: int, group: int, bits: int = 4) -> Tensors:
    """AWQ `gemm`: codes packed along the outputs, zero points always stored."""
    words, groups = rows * bits // 32, columns // group
    return {
        f"{name}.qweight": ("I32", [columns, words], b"\x76\x54\x32\x10" * (columns * words)),
        f"{name}.qzeros": ("I32", [groups, words], b"\x87\x78\x97\x79" * (groups * words)),
        f"{name}.scales": ("F16", [groups, rows], b"\x00\x20" * (groups * rows)),
    }


def gptq(name: str, rows: int, columns: int, group: int, bits: int = 4, symmetric: bool = True) -> Tensors:
    """GPTQ v1: codes packed along the inputs; a zero point is stored minus one, so 7 everywhere is symmetric."""
    deep, groups = columns * bits // 32, columns // group
    zeros = b"\x77\x77\x77\x77" if symmetric else b"\x86\x57\x79\x68"
    return {
        f"{name}.qweight": ("I32", [deep, rows], b"\x76\x54\x32\x10" * (deep * rows)),
        f"{name}.qzeros": ("I32", [groups, rows * bits // 32], zeros * (groups * rows * bits // 32)),
        f"{name}.scales": ("F16", [groups, rows], b"\x00\x20" * (groups * rows)),
        f"{name}.g_idx": ("I32", [columns], struct.pack(f"<{columns}i", *(n // group for n in range(columns)))),
    }


def text_config(**changes: Any) -> dict[str, Any]:
    """config.json of a dense target without quantization."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "dtype": "bfloat16",
        **changes,
    }


def declared_ct(bits: int = 4, group: int = 32, symmetric: bool = True, ignore: list[str] | None = None) -> Any:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"] if ignore is None else ignore,
    }


def declared_awq(bits: int = 4, group: int = 32, keep: list[str] | None = None) -> Any:
    return {"quant_method": "awq", "version": "gemm", "bits": bits, "group_size": group, "zero_point": True,
            "modules_to_not_convert": keep or []}  # fmt: skip


def declared_gptq(bits: int = 4, group: int = 32, symmetric: bool = True) -> Any:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": False,
            "checkpoint_format": "gptq", "lm_head": False}  # fmt: skip


def tensors_of(
    convention: str, bits: int = 4, group: int = 32, symmetric: bool = True, bf16: tuple[str, ...] = ()
) -> Tensors:
    """The target's tensors; `bf16`: Linears (by the end of their name) that stay plain."""
    tensors = plain("model.embed_tokens", VOCABULARY, HIDDEN) | plain("model.norm", HIDDEN)
    for layer in range(LAYERS):
        for name, (rows, columns) in LINEARS.items():
            full = f"model.layers.{layer}.{name}"
            if full.endswith(bf16) if bf16 else False:
                tensors |= plain(full, rows, columns)
            elif convention == "ct":
                tensors |= packed(full, rows, columns, group, bits, symmetric)
            elif convention == "awq":
                tensors |= awq(full, rows, columns, group, bits)
            elif convention == "gptq":
                tensors |= gptq(full, rows, columns, group, bits, symmetric)
            else:
                tensors |= plain(full, rows, columns)
        tensors |= plain(f"model.layers.{layer}.input_layernorm", HIDDEN)
    return tensors


def folder(
    tensors: Tensors, quantization: Any = None, config: dict[str, Any] | None = None, **more: bytes
) -> dict[str, bytes]:
    """A model folder of one file; `more`: file name (with `__` for the dot) -> content."""
    settings = config or text_config()
    if quantization is not None:
        settings = settings | {"quantization_config": quantization}
    files = {
        "config.json": pretty(settings),
        "generation_config.json": pretty({"eos_token_id": settings.get("eos_token_id", 2)}),
        "model.safetensors": safetensors.dumps(tensors),
        "tokenizer.json": pretty({"model": {"type": "BPE"}}),
        "tokenizer_config.json": pretty({"eos_token": "<|im_end|>"}),
        "chat_template.jinja": TEMPLATE,
    }
    return files | {name.replace("__", "."): data for name, data in more.items()}


def target(convention: str = "ct", **scheme: Any) -> dict[str, bytes]:
    """An honest target folder."""
    declared = {"ct": declared_ct, "awq": declared_awq, "gptq": declared_gptq}[convention]
    told = {key: value for key, value in scheme.items() if key in ("bits", "group", "symmetric")}
    return folder(tensors_of(convention, **scheme), declared(**told))


def sharded(files: dict[str, bytes], drop: str | None = None) -> dict[str, bytes]:
    """The same folder in two shards with an index; `drop`: a shard that is left out."""
    header = json.loads(files["model.safetensors"][8 : 8 + int.from_bytes(files["model.safetensors"][:8], "little")])
    start = 8 + int.from_bytes(files["model.safetensors"][:8], "little")
    names = [name for name in header if name != "__metadata__"]
    halves = {"model-00001-of-00002.safetensors": names[: len(names) // 2],
              "model-00002-of-00002.safetensors": names[len(names) // 2 :]}  # fmt: skip
    result = {name: data for name, data in files.items() if name != "model.safetensors"}
    weight_map = {}
    for shard, held in halves.items():
        tensors: Tensors = {}
        for name in held:
            first, last = header[name]["data_offsets"]
            data = files["model.safetensors"][start + first : start + last]
            tensors[name] = (header[name]["dtype"], header[name]["shape"], data)
            weight_map[name] = shard
        if shard != drop:
            result[shard] = safetensors.dumps(tensors)
    result["model.safetensors.index.json"] = pretty({"metadata": {}, "weight_map": weight_map})
    return result


def drafter(
    *, block: int = 16, taps: tuple[int, ...] = (0, 1), window: int | None = 1024, hidden: int = HIDDEN,
    inputs: int | None = None, group: int | None = 64, layers: int = 1, target_layers: int = LAYERS,
    vocabulary: int = VOCABULARY, mask: int = 3, causal: bool = False,
) -> dict[str, bytes]:  # fmt: skip
    """A DFlash drafter in z-lab's form; `inputs`: of `fc` (what the taps make, if None); `group`: None for BF16."""
    wide = inputs or len(taps) * hidden

    def linear(name: str, rows: int, columns: int) -> Tensors:
        return plain(name, rows, columns) if group is None else packed(name, rows, columns, group)

    tensors = linear("fc", hidden, wide) | plain("norm", hidden) | plain("hidden_norm", hidden)
    for layer in range(layers):
        for name, (rows, columns) in LINEARS.items():
            tensors |= linear(f"layers.{layer}.{name}", rows * hidden // HIDDEN, columns * hidden // HIDDEN)
    dflash: dict[str, Any] = {"mask_token_id": mask, "target_layer_ids": list(taps)}
    config: dict[str, Any] = {
        **text_config(hidden_size=hidden, intermediate_size=WIDE * hidden // HIDDEN, vocab_size=vocabulary),
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": layers,
        "num_target_layers": target_layers,
        "block_size": block,
        "layer_types": ["full_attention" if window is None else "sliding_attention"] * layers,
        "use_sliding_window": window is not None,
        "tie_word_embeddings": False,
        "dflash_config": dflash,
    }
    del config["eos_token_id"]
    if window is not None:
        config |= {"sliding_window": window, "max_window_layers": 0}
        dflash |= {"causal": causal, "swa_window_size": window}
    if group is not None:
        config["quantization_config"] = declared_ct(4, group, ignore=["lm_head", "re:.*embed_tokens$"])
    return {"config.json": pretty(config), "model.safetensors": safetensors.dumps(tensors)}


def speculators_drafter(taps: tuple[int, ...] = (0, 1), block: int = 16) -> dict[str, bytes]:
    """The same drafter in speculators' form: layer ids are taps + 1."""
    files = drafter(taps=taps, block=block, window=None, group=None)
    config = json.loads(files["config.json"])
    del config["dflash_config"]
    layer_config = {key: config.pop(key) for key in ("hidden_size", "intermediate_size", "num_hidden_layers",
                    "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rope_theta",
                    "max_position_embeddings", "layer_types")}  # fmt: skip
    spoken = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "block_size": block,
        "mask_token_id": 3,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in taps],
        "draft_vocab_size": VOCABULARY,
        "transformer_layer_config": {"model_type": "qwen3", **layer_config},
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": block - 1}],
            "verifier": {"name_or_path": "x/target", "architectures": ["Qwen3ForCausalLM"]},
        },
    }
    return files | {"config.json": pretty(spoken)}
