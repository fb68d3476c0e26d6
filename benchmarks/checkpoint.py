"""A Qwen3.5-shaped BF16 checkpoint of a wanted size, with random weights, and the recipe of seven stages on it.

Made from a fixed seed, outside the repository; a test's recipe is used as it is. Knows no figure.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "compiler")]

import torch  # noqa: E402
from folder_project import project  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from qdc.formats import qwen35  # noqa: E402
from qdc.methods import tokenizer  # noqa: E402

VOCABULARY = 512
HIDDEN = 2048


def given_project(folder: Path, size: int) -> Path:
    """The recipe in a new folder, with a checkpoint of at least `size` bytes beside it; returns the recipe's path."""
    recipe = project(folder)
    base = folder / "base"
    base.mkdir()
    template = (folder / "chatml.jinja").read_text()
    backend = tokenizer.train_byte_bpe(["user\n", "assistant\n", "1 + 1 = 2\n"] * 50, VOCABULARY, "<|mask|>")
    tokenizer.write_tokenizer(backend, base, template, 2048, "<|mask|>")
    known = tokenizer.load_tokenizer(base)
    config = qwen35.text_config(_architecture(size), VOCABULARY, {"pad": known.pad_id, "eos": known.eos_id})
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


def _architecture(size: int) -> dict[str, object]:
    """As many pairs of layers as make the size; narrow ones where it is small."""
    hidden = HIDDEN if size > 1 << 28 else HIDDEN // 16
    heads = max(1, hidden // 128)
    chosen: dict[str, object] = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "layers": [],
        "attention": {"heads": heads, "kv_heads": max(1, heads // 4), "head_dim": 128},
        "linear_attention": {
            "key_heads": max(1, heads // 2),
            "value_heads": heads,
            "head_dim": 128,
            "conv_kernel": 4,
        },
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "init_range": 0.05,
    }
    made = 0
    while made < size:
        chosen["layers"] = [*chosen["layers"], "linear_attention", "full_attention"]  # type: ignore[misc]
        shapes = qwen35.tensor_shapes(qwen35.text_config(chosen, VOCABULARY, {"pad": 0, "eos": 1}))
        made = sum(2 * math.prod(shape) for shape in shapes.values())
    return chosen
