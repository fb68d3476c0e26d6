"""A recipe of seven stages on a given checkpoint: no QAD, no drafter, no Debian base."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAGES = {"base", "quantize", "pack-target", "base-image", "runtime", "layer:target", "image"}
RECIPE = r"""
version: 1
name: given
target:
  base: {path: base}
  quantization:
    method: rtn
    scheme: {bits: 4, group_size: 32, symmetric: true}
    ignore: [lm_head, "re:.*linear_attn\\.in_proj_[ab]$", "re:.*conv1d$"]
data: {}
serve:
  engine: {vllm: "0.32.0", platform: cpu, prefix_caching: false, patches: [amx-permission, torchvision-ops]}
  max_model_len: 128
  max_num_seqs: 4
  dtype: bfloat16
  chat_template: chatml.jinja
deploy: {hardware: cpu, contract: adaptfm, size_limit: {bytes: 20e9, of: docker-save}}
image: {base: {scratch: true}}
evaluate: {}
"""


def project(folder: Path, checkpoint: Path | None = None) -> Path:
    """Write the recipe, and copy its checkpoint beside it; returns the recipe's path. Both are made here."""
    folder.mkdir(parents=True)
    recipe = folder / "given.yaml"
    recipe.write_text(RECIPE)
    shutil.copyfile(ROOT / "recipes" / "templates" / "chatml.jinja", folder / "chatml.jinja")
    if checkpoint is not None:
        shutil.copytree(checkpoint, folder / "base", copy_function=shutil.copyfile)
    return recipe
