"""A target of two layers that is built in milliseconds, for tests of numerics and of stages."""

from __future__ import annotations

from typing import Any

from qdc.formats import qwen35
from qdc.methods import qwen
from qdc.methods.qwen_model import Qwen

ARCHITECTURE: dict[str, Any] = {
    "kind": "qwen3_5",
    "hidden_size": 32,
    "intermediate_size": 64,
    "layers": ["linear_attention", "full_attention"],
    "attention": {"heads": 2, "kv_heads": 1, "head_dim": 32},
    "linear_attention": {"key_heads": 1, "value_heads": 2, "head_dim": 16, "conv_kernel": 4},
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "init_range": 0.2,
}


def small_model(seed: int = 0, vocab: int = 64) -> Qwen:
    return qwen.build_model(qwen35.text_config(ARCHITECTURE, vocab, {"pad": 0, "eos": 2}), seed).eval()
