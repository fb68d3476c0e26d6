"""Qwen3.5 text models on paper: a configuration from sizes, and the names and shapes of all tensors from it.

Standard library only. The same names and shapes as transformers' `Qwen3_5ForCausalLM` (5.17); `qdc.methods.qwen`
holds the model itself. A published checkpoint is a whole model (`Qwen3_5ForConditionalGeneration`: the language model
beside a vision tower and an MTP head), and engines before vLLM 0.27 have no class for less: `text_of` and `whole_of`
lead from one form to the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qdc.formats.checkpoint import ModelFacts, TensorFacts

ARCHITECTURE = "Qwen3_5ForCausalLM"
WHOLE_ARCHITECTURE = "Qwen3_5ForConditionalGeneration"
FILE = "model.safetensors"
_TEXT, WHOLE = "model.", "model.language_model."
_LEFT_OUT = ("model.visual.", "mtp.")
_OF_POSITIONS = ("mrope_section", "mrope_interleaved")
_NO_VISION = {
    "model_type": "qwen3_5",
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
}
"""A vision tower that is never filled: the engine serves the language model alone, and still reads these sizes."""
_NOT_QUANTIZED = "re:.*visual.*"
"""What an engine that lays the tower out must be told, or it wants these sizes to be whole quantization groups."""


def text_config(architecture: Mapping[str, Any], vocab_size: int, special: Mapping[str, int]) -> dict[str, Any]:
    """The `config.json` of a small Qwen3.5 from a recipe's `architecture`; `special`: ids of pad and eos."""
    attention, linear = architecture["attention"], architecture["linear_attention"]
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": architecture["hidden_size"],
        "intermediate_size": architecture["intermediate_size"],
        "num_hidden_layers": len(architecture["layers"]),
        "layer_types": list(architecture["layers"]),
        "num_attention_heads": attention["heads"],
        "num_key_value_heads": attention["kv_heads"],
        "head_dim": attention["head_dim"],
        "linear_num_key_heads": linear["key_heads"],
        "linear_num_value_heads": linear["value_heads"],
        "linear_key_head_dim": linear["head_dim"],
        "linear_value_head_dim": linear["head_dim"],
        "linear_conv_kernel_dim": linear["conv_kernel"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(architecture["rope_theta"]),
            "partial_rotary_factor": 0.25,
        },
        "max_position_embeddings": architecture["max_position_embeddings"],
        "initializer_range": float(architecture["init_range"]),
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": None,
        "pad_token_id": special["pad"],
        "eos_token_id": special["eos"],
    }


def linear_shapes(config: Mapping[str, Any], kind: str) -> dict[str, tuple[int, int]]:
    """(out, in) of every Linear of a decoder layer of `kind`, by its name inside the layer."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes = {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    if kind == "full_attention":
        heads, kv, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        return shapes | {
            "self_attn.q_proj": (2 * heads * width, hidden),
            "self_attn.k_proj": (kv * width, hidden),
            "self_attn.v_proj": (kv * width, hidden),
            "self_attn.o_proj": (hidden, heads * width),
        }
    keys, values = _linear_widths(config)
    return shapes | {
        "linear_attn.in_proj_qkv": (2 * keys + values, hidden),
        "linear_attn.in_proj_z": (values, hidden),
        "linear_attn.in_proj_a": (config["linear_num_value_heads"], hidden),
        "linear_attn.in_proj_b": (config["linear_num_value_heads"], hidden),
        "linear_attn.out_proj": (hidden, values),
    }


def tensor_shapes(config: Mapping[str, Any], prefix: str = "model.") -> dict[str, tuple[int, ...]]:
    """Shape of every stored tensor of a text model; `prefix`: before `layers`. A tied head is not stored."""
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}embed_tokens.weight": (config["vocab_size"], hidden)}
    for index, kind in enumerate(config["layer_types"]):
        layer = f"{prefix}layers.{index}."
        shapes |= {f"{layer}{name}.weight": shape for name, shape in linear_shapes(config, kind).items()}
        shapes |= {f"{layer}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        if kind == "full_attention":
            shapes |= {f"{layer}self_attn.{name}.weight": (config["head_dim"],) for name in ("q_norm", "k_norm")}
            continue
        keys, values = _linear_widths(config)
        heads = config["linear_num_value_heads"]
        shapes |= {f"{layer}linear_attn.{name}": (heads,) for name in ("A_log", "dt_bias")}
        shapes[f"{layer}linear_attn.conv1d.weight"] = (2 * keys + values, 1, config["linear_conv_kernel_dim"])
        shapes[f"{layer}linear_attn.norm.weight"] = (config["linear_value_head_dim"],)
    shapes[f"{prefix}norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return dict(sorted(shapes.items()))


def text_name(name: str) -> str | None:
    """A tensor of a whole model as the text model has it; None for the vision tower's and the MTP head's.

    Raises ValueError for a name that is none of a whole model's.
    """
    if name.startswith(WHOLE):
        return _TEXT + name.removeprefix(WHOLE)
    if name.startswith(_LEFT_OUT):
        return None
    if name.startswith(_TEXT):
        raise ValueError(f"{name!r} is no tensor of a {WHOLE_ARCHITECTURE}")
    return name


def text_form(name: str) -> str:
    """A tensor of either form as the text model has it; any other name as it is."""
    return _TEXT + name.removeprefix(WHOLE) if name.startswith(WHOLE) else name


def whole_name(name: str) -> str:
    """A tensor, or a module, of the text model as a whole model has it."""
    return WHOLE + name.removeprefix(_TEXT) if name.startswith(_TEXT) else name


def text_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of a whole model's language model alone.

    Sections of rotary positions by image and video axes are left out: for text all axes are one. Raises KeyError where
    the whole has no `text_config`.
    """
    text = {**config["text_config"], "architectures": [ARCHITECTURE], "model_type": "qwen3_5_text"}
    text.setdefault("dtype", config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    text.setdefault("tie_word_embeddings", config.get("tie_word_embeddings", False))
    if isinstance(text.get("rope_parameters"), dict):
        kept = {key: value for key, value in text["rope_parameters"].items() if key not in _OF_POSITIONS}
        text["rope_parameters"] = kept
    return {key: value for key, value in text.items() if not key.startswith("mtp_")}


def whole_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` under which an engine that knows only whole models serves the language model `config`."""
    outer = ("architectures", "quantization_config")
    made: dict[str, Any] = {
        "architectures": [WHOLE_ARCHITECTURE],
        "model_type": "qwen3_5",
        "dtype": config.get("dtype", "bfloat16"),
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "text_config": {key: value for key, value in config.items() if key not in outer},
        "vision_config": {**_NO_VISION, "out_hidden_size": config["hidden_size"]},
    }
    if (quantization := config.get("quantization_config")) is not None:
        ignored = [name if name.startswith("re:") else whole_name(name) for name in quantization.get("ignore", [])]
        made["quantization_config"] = {**quantization, "ignore": [*ignored, _NOT_QUANTIZED]}
    return made


def scratch_facts(scratch: Mapping[str, Any]) -> ModelFacts:
    """Facts of a model that a recipe trains from nothing, before it is trained; token ids are not known yet."""
    config = text_config(scratch["architecture"], scratch["tokenizer"]["vocab_size"], {"pad": -1, "eos": -1})
    for name in ("pad_token_id", "eos_token_id"):
        del config[name]
    tensors = {name: TensorFacts(FILE, "BF16", shape) for name, shape in tensor_shapes(config).items()}
    return ModelFacts(config=config, tensors=tensors, shards=(FILE,))


def _linear_widths(config: Mapping[str, Any]) -> tuple[int, int]:
    """Widths of all keys (also queries) and of all values of a Gated DeltaNet layer."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return int(keys), int(config["linear_num_value_heads"] * config["linear_value_head_dim"])
