"""The stages there are: module, environment, determinism, what else its key covers.

Data, one line a kind. Parameters and inputs of instances are in `expand`; numerics are in `qdc.methods`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Determinism = Literal["exact", "seeded", "sampled", "imported"]


@dataclass(frozen=True)
class Kind:
    """`packages`: locked packages whose versions matter to the output. `data`: files beside the code that matter
    (globs below the package). `lane`: "compute" stages run a few at a time, "io" stages beside them. `makes`: files
    and folders that every output has. `parallel`: whether its module can train in several processes (torchrun), which
    is a user setting."""

    module: str
    environment: Literal["train", "core"]
    determinism: Determinism
    packages: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    lane: Literal["compute", "io"] = "compute"
    makes: tuple[str, ...] = ()
    parallel: bool = False

    @property
    def has_models(self) -> bool:
        """Whether it computes with tensors, and so has a device."""
        return "torch" in self.packages


_TEXT = ("tokenizers", "jinja2")
_MODEL = ("torch", "tokenizers", "safetensors", "jinja2")
_PACK = ("torch", "safetensors")

KINDS: dict[str, Kind] = {
    "prompts": Kind("prompts", "train", "exact", makes=("prompts.jsonl", "summary.json")),
    "base": Kind(
        "base",
        "train",
        "seeded",
        _MODEL,
        makes=(
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
        ),
    ),
    "corpus": Kind("corpus", "train", "seeded", _MODEL, makes=("conversations.jsonl", "summary.json")),
    "pack": Kind("pack", "train", "exact", _TEXT, makes=("train.safetensors", "heldout.safetensors", "pack.json")),
    "quantize": Kind("quantize", "train", "seeded", _MODEL, makes=("grid.safetensors", "grid.json")),
    "distill": Kind("distill", "train", "seeded", _MODEL, makes=("checkpoints", "training.json"), parallel=True),
    "select": Kind("select", "train", "seeded", _MODEL, makes=("selected.safetensors", "selection.json")),
    "pack-target": Kind("pack_target", "train", "seeded", _PACK, makes=("ct", "dense", "proof.json")),
    "wrap-target": Kind("wrap_target", "core", "exact", lane="io", makes=("ct", "proof.json")),
    "draft-train": Kind(
        "draft_train",
        "train",
        "seeded",
        _MODEL,
        makes=("config.json", "model.safetensors", "training.json"),
        parallel=True,
    ),
    "calibrate": Kind("calibrate", "train", "exact", _TEXT, makes=("calibration.jsonl", "summary.json")),
    "draft-quantize": Kind(
        "draft_quantize",
        "train",
        "seeded",
        _PACK,
        makes=("config.json", "model.safetensors", "dense.safetensors", "ptq.json"),
    ),
    "evaluate-target": Kind("evaluate_target", "train", "seeded", _MODEL, makes=("evaluation.json",)),
    "evaluate-drafter": Kind("evaluate_drafter", "train", "seeded", _MODEL, makes=("evaluation.json", "prompts.jsonl")),
    "layer": Kind("layer", "core", "exact", lane="io", makes=("layer.json",)),
    "base-image": Kind("base_image", "core", "sampled", lane="io", makes=("packages.json", "layer.json")),
    "given-base": Kind("given_base", "core", "exact", lane="io", makes=("packages.json", "base.json")),
    "runtime": Kind("runtime", "core", "exact", lane="io", makes=("packages.json", "layer.json")),
    "image": Kind(
        "image",
        "core",
        "exact",
        data=("serving/**/*", "tables/engines.json", "@templates/Dockerfile.j2"),
        lane="io",
        makes=("image.json", "manifest.json", "serve.json"),
    ),
}
