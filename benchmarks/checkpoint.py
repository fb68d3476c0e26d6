"""A Qwen3.5-shaped BF16 checkpoint of a wanted size, with random weights, and the recipe of seven stages on it.

Made from a fixed seed, outside the repository; a test's recipe is used as it is. Knows no figure.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "compiler")]

import torch  # noqa: E402
from folder_project import project  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from qdc.formats import qwen35  # noqa: E402
from qdc.methods import tokenizer  # noqa: E402

TOKENS = 512
"""Of the tokenizer; as in the real models, the embedding has rows that no token uses."""
LARGE, SMALL = (3072, 248_320), (128, 1024)
"""Hidden size, rows of the embedding."""


def given_project(folder: Path, size: int) -> Path:
    """The recipe in a new folder, with a checkpoint of at least `size` bytes beside it; returns the recipe's path."""
    recipe = project(folder)
    base = folder / "base"
    base.mkdir()
    template = (folder / "chatml.jinja").read_text()
    backend = tokenizer.train_byte_bpe(["user\n", "assistant\n", "1 + 1 = 2\n"] * 50, TOKENS, "<|mask|>")
    tokenizer.write_tokenizer(backend, base, template, 2048, "<|mask|>")
    known = tokenizer.load_tokenizer(base)
    config = _config(size, {"pad": known.pad_id, "eos": known.eos_id})
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(shape, generator=generator).mul_(0.05).to(torch.bfloat16)
        for name, shape in qwen35.tensor_shapes(config).items()
    }
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    (base / "config.json").write_text(json.dumps(config))
    ends = {"do_sample": False, "eos_token_id": known.eos_id, "pad_token_id": known.pad_id}
    (base / "generation_config.json").write_text(json.dumps(ends))
    return recipe


def _config(size: int, special: dict[str, int]) -> dict[str, Any]:
    """As many pairs of layers as make the size, beside the embedding."""
    hidden, rows = LARGE if size > 1 << 30 else SMALL
    heads = hidden // 64
    chosen: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "layers": [],
        "attention": {"heads": heads, "kv_heads": heads // 2, "head_dim": 64},
        "linear_attention": {"key_heads": heads // 2, "value_heads": heads, "head_dim": 64, "conv_kernel": 4},
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "init_range": 0.05,
    }
    while True:
        chosen["layers"] = [*chosen["layers"], "linear_attention", "full_attention"]
        config = qwen35.text_config(chosen, rows, special)
        if sum(2 * math.prod(shape) for shape in qwen35.tensor_shapes(config).values()) >= size:
            return config
