"""A very small model through every stage of the target, for tests that need real stage outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from small_model import ARCHITECTURE
from stage_harness import CHATML, run_stage

SCHEME = {"bits": 4, "group_size": 16, "symmetric": True}
IGNORE = ["lm_head", "re:.*conv1d$", r"re:.*linear_attn\.in_proj_[ab]$"]
SAMPLING = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_tokens": 24, "seed": 7}
BASE: dict[str, Any] = {
    "scratch": {
        "architecture": {**ARCHITECTURE, "init_range": 0.05},
        "tokenizer": {"kind": "byte-bpe", "vocab_size": 480, "mask_token": "<|mask|>"},
        "training": {
            "steps": 12,
            "batch": {"sequences": 4, "sequence_length": 64},
            "optimizer": {"kind": "muon", "lr": 1e-2, "momentum": 0.95, "betas": [0.9, 0.95], "weight_decay": 0.05},
            "schedule": {"kind": "cosine", "warmup_steps": 2, "final_ratio": 0.02},
            "prompt_loss_weight": 0.1,
            "grad_clip": 1.0,
            "precision": "bf16-autocast",
            "seed": 1,
        },
    },
    "chat_template": CHATML,
}
QAD: dict[str, Any] = {
    "trainable": "quantized-weights",
    "loss": {"kind": "forward-kl", "temperature": 1.0},
    "optimizer": {"kind": "adamw", "lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.0},
    "schedule": {"kind": "cosine", "warmup_ratio": 0.03, "steps": 6},
    "batch": {"effective": 4, "sequence_length": 64},
    "heldout_ratio": 0.2,
    "grad_clip": 1.0,
    "clip_of": "mean",
    "checkpoints": {"every": 2},
    "seed": 42,
}
SELECT = {"metric": "heldout-kl", "temperature": 1.0, "trainable": "quantized-weights"}
PACK = {"scheme": SCHEME, "ignore": IGNORE, "trainable": "quantized-weights"}


def synthetic(count: int, seed: int) -> dict[str, Any]:
    return {"synthetic": {"kind": "arithmetic-chat", "count": count, "seed": seed}, "answers": True}


class Chain:
    """The outputs of every stage, each made once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.out: dict[str, Path] = {}

    def run(self, name: str, kind: str, inputs: dict[str, str], params: dict[str, Any]) -> Path:
        given = {role: self.out[made] for role, made in inputs.items()}
        self.out[name] = run_stage(kind, given, params, self.root / name)
        return self.out[name]


def build(root: Path) -> Chain:
    """Prompts to packed target, in about three seconds of CPU."""
    made = Chain(root)
    made.run("heldout", "prompts", {}, synthetic(24, 9))
    made.run("prompts", "prompts", {"exclude_0": "heldout"}, synthetic(60, 1))
    made.run("text", "prompts", {"exclude_0": "heldout"}, synthetic(300, 11))
    made.run("base", "base", {"text": "text"}, BASE)
    by_teacher = {"by": "teacher", "model_folder": ".", "sampling": SAMPLING, "truncated": "keep"}
    made.run("corpus", "corpus", {"prompts": "prompts", "model": "base"}, by_teacher)
    lengths = {"sequence_length": 64, "heldout_ratio": 0.2, "seed": 42}
    made.run("pack", "pack", {"corpus": "corpus", "tokenizer": "base"}, lengths)
    rtn = {"method": "rtn", "scheme": SCHEME, "ignore": IGNORE, "calibration": None}
    made.run("grid", "quantize", {"base": "base"}, rtn)
    made.run("distill", "distill", {"teacher": "base", "grid": "grid", "data": "pack"}, QAD)
    chosen = {"teacher": "base", "grid": "grid", "data": "pack", "checkpoints": "distill"}
    made.run("select", "select", chosen, SELECT)
    made.run("target", "pack-target", {"base": "base", "grid": "grid", "selected": "select"}, PACK)
    return made
