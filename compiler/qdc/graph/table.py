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
    (globs below the package). `lane`: "compute" stages run a few at a time, "io" stages beside them."""

    module: str
    environment: Literal["train", "core"]
    determinism: Determinism
    packages: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    lane: Literal["compute", "io"] = "compute"


_TEXT = ("tokenizers", "jinja2")
_MODEL = ("torch", "tokenizers", "safetensors", "jinja2")
_PACK = ("torch", "safetensors")

KINDS: dict[str, Kind] = {
    "prompts": Kind("prompts", "train", "exact"),
    "base": Kind("base", "train", "seeded", _MODEL),
    "corpus": Kind("corpus", "train", "seeded", _MODEL),
    "pack": Kind("pack", "train", "exact", _TEXT),
    "quantize": Kind("quantize", "train", "seeded", _MODEL),
    "distill": Kind("distill", "train", "seeded", _MODEL),
    "select": Kind("select", "train", "seeded", _MODEL),
    "pack-target": Kind("pack_target", "train", "seeded", _PACK),
    "draft-train": Kind("draft_train", "train", "seeded", _MODEL),
    "calibrate": Kind("calibrate", "train", "exact", _TEXT),
    "draft-quantize": Kind("draft_quantize", "train", "seeded", _PACK),
    "evaluate-target": Kind("evaluate_target", "train", "seeded", _MODEL),
    "evaluate-drafter": Kind("evaluate_drafter", "train", "seeded", _MODEL),
    "layer": Kind("layer", "core", "exact", lane="io"),
    "base-image": Kind("base_image", "core", "sampled", lane="io"),
    "runtime": Kind("runtime", "core", "exact", lane="io"),
    "image": Kind("image", "core", "exact", data=("serving/**/*", "@templates/Dockerfile.j2"), lane="io"),
}
