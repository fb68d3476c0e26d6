"""Facts of published checkpoints, written from what is known of their shapes: no file is read.

Qwen3.5-4B in its multimodal layout, an INT4 pack of it as compressed-tensors has it, and a DFlash drafter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from qdc.formats.checkpoint import ModelFacts, TensorFacts, TokenizerFacts
from qdc.formats.qwen35 import tensor_shapes
from qdc.recipe.load import Loaded, sources

PREFIX = "model.language_model."
TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": 248320,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "layer_types": [("full_attention" if i % 4 == 3 else "linear_attention") for i in range(32)],
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
    "eos_token_id": 248044,
}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": True,
    "text_config": TEXT,
}
GENERATION = {"eos_token_id": [248046, 248044], "pad_token_id": 248044}
TOKENIZER = TokenizerFacts(
    size=248077,
    special={
        248044: "<|endoftext|>",
        248045: "<|im_start|>",
        248046: "<|im_end|>",
        248070: "<|audio_start|>",
    },
    eos=248046,
    template="6f" * 32,
)
GRID = (r".*in_proj_a$", r".*in_proj_b$")
FILE = "model-00001-of-00001.safetensors"
MTP_LINEAR = {
    "mlp.gate_proj": (9216, 2560),
    "mlp.up_proj": (9216, 2560),
    "mlp.down_proj": (2560, 9216),
    "self_attn.q_proj": (8192, 2560),
    "self_attn.k_proj": (1024, 2560),
    "self_attn.v_proj": (1024, 2560),
    "self_attn.o_proj": (2560, 4096),
}


def base() -> ModelFacts:
    """Qwen3.5-4B with its MTP head and a part of its vision tower."""
    shapes = tensor_shapes(TEXT, PREFIX) | _others()
    tensors = {name: TensorFacts(FILE, "BF16", shape) for name, shape in shapes.items()}
    return ModelFacts(CONFIG, GENERATION, tensors, dict.fromkeys(tensors, FILE), (FILE,), {}, TOKENIZER, "apache-2.0")


def pack(group: int = 32, symmetric: bool = True, skipped: tuple[str, ...] = GRID) -> ModelFacts:
    """The same with every Linear of the text layers and of the MTP layer packed to INT4, but those `skipped`."""
    tensors: dict[str, TensorFacts] = {}
    for name, facts in base().tensors.items():
        module = name.removesuffix(".weight")
        linear = len(facts.shape) == 2 and ".layers." in name and "visual" not in name
        if not linear or any(re.match(pattern, module) for pattern in skipped):
            tensors[name] = facts
            continue
        out, width = facts.shape
        tensors[f"{module}.weight_packed"] = TensorFacts(FILE, "I32", (out, width // 8))
        tensors[f"{module}.weight_scale"] = TensorFacts(FILE, "BF16", (out, width // group))
        tensors[f"{module}.weight_shape"] = TensorFacts(FILE, "I64", (2,))
        if not symmetric:
            tensors[f"{module}.weight_zero_point"] = TensorFacts(FILE, "I32", (out // 8, width // group))
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": symmetric}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*visual.*", *(f"re:{pattern}" for pattern in skipped), "mtp.fc"],
    }
    config = {**CONFIG, "quantization_config": quantization}
    return ModelFacts(config, GENERATION, tensors, None, (FILE,), {}, TOKENIZER, "apache-2.0")


def drafter(layers: int = 5, taps: tuple[int, ...] = (1, 8, 15, 22, 29)) -> ModelFacts:
    """A DFlash drafter in z-lab's format."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 16,
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": list(taps)},
        "num_target_layers": 32,
        "num_hidden_layers": layers,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "layer_types": ["full_attention"] * layers,
        "rope_theta": 1e7,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "dtype": "bfloat16",
    }
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (2560, len(taps) * 2560), "hidden_norm.weight": (2560,)}
    linear = {
        "self_attn.q_proj": (4096, 2560),
        "self_attn.k_proj": (1024, 2560),
        "self_attn.v_proj": (1024, 2560),
        "self_attn.o_proj": (2560, 4096),
        "mlp.gate_proj": (9728, 2560),
        "mlp.up_proj": (9728, 2560),
        "mlp.down_proj": (2560, 9728),
    }
    for index in range(layers):
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in linear.items()}
        shapes |= {f"layers.{index}.self_attn.{name}.weight": (128,) for name in ("q_norm", "k_norm")}
        shapes |= {f"layers.{index}.{name}.weight": (2560,) for name in ("input_layernorm", "post_attention_layernorm")}
    shapes["norm.weight"] = (2560,)
    tensors = {name: TensorFacts("model.safetensors", "BF16", shape) for name, shape in shapes.items()}
    return ModelFacts(config=config, tensors=tensors, shards=("model.safetensors",), licence="mit")


def facts_for(loaded: Loaded) -> dict[str, ModelFacts]:
    """Facts of every checkpoint that a recipe of Qwen3.5-4B names: files as that recipe, unedited, describes them."""
    makers = {"base": base, "grid": pack, "checkpoint": drafter, "init": drafter}
    makers |= PUBLISHED.get(loaded.model.name, {})
    return {".".join(map(str, place)): makers[str(place[-1])]() for place in sources(loaded.model)}


PUBLIC_GRID = partial(pack, 128, False, (*GRID, r"mtp\."))
PUBLISHED: dict[str, dict[str, Callable[[], ModelFacts]]] = {
    "qwen35-4b-dflash-public": {"grid": PUBLIC_GRID, "checkpoint": partial(drafter, 6, (1, 7, 12, 18, 23, 29))},
    "qwen35-4b-ngram": {"grid": PUBLIC_GRID},
    "qwen35-4b-suffix": {
        "grid": partial(pack, 128, False, (r".*linear_attn", r".*self_attn", r".*layers\.0\.", r"mtp\."))
    },
}


def edited(facts: dict[str, ModelFacts], edits: dict[str, Any]) -> dict[str, ModelFacts]:
    """`facts` with parts replaced: place -> mapping that is merged into its JSON form; null removes."""
    changed = dict(facts)
    for place, edit in edits.items():
        changed[place] = ModelFacts.from_json(_merged(facts[place].as_json(), edit))
    return changed


def _merged(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    kept = {key: value for key, value in old.items() if not (key in new and new[key] is None)}
    return kept | {key: _merged(old.get(key), value) for key, value in new.items() if value is not None}


def _others() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"mtp.fc.weight": (2560, 5120), "mtp.norm.weight": (2560,)}
    shapes |= {f"mtp.layers.0.{name}.weight": shape for name, shape in MTP_LINEAR.items()}
    shapes |= {
        "model.visual.blocks.0.attn.qkv.weight": (3072, 1024),
        "model.visual.blocks.0.attn.proj.weight": (1024, 1024),
    }
    return shapes
