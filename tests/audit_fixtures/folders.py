"""Plain model folders whose words and bytes differ."""

from __future__ import annotations

import json
from typing import Any

from audit_fixtures import models
from audit_fixtures.pieces import Folder, pretty
from qdc.formats import safetensors


def told(convention: str, quantization: dict[str, Any], **scheme: Any) -> Folder:
    """A folder whose config.json says `quantization` over weights of `scheme`."""
    return Folder(models.folder(models.tensors_of(convention, **scheme), quantization))


def eos(config: Any, generation: Any, rows: int = models.VOCABULARY) -> Folder:
    settings = models.text_config(eos_token_id=config, vocab_size=rows)
    tensors = models.tensors_of("ct") | models.plain("model.embed_tokens", rows, models.HIDDEN)
    files = models.folder(tensors, models.declared_ct(), settings)
    return Folder(files | {"generation_config.json": pretty({"eos_token_id": generation})})


def missing_shard() -> Folder:
    return Folder(models.sharded(models.target("ct"), drop="model-00002-of-00002.safetensors"))


def whole_shards() -> Folder:
    return Folder(models.sharded(models.target("ct")))


def unnamed_shard() -> Folder:
    """A weights file beside the index that the index does not name: it belongs to another download."""
    files = models.sharded(models.target("ct"))
    stray = models.plain("model.layers.0.self_attn.q_proj", 64, 64)
    return Folder(files | {"model-00003-of-00003.safetensors": safetensors.dumps(stray)})


def cut_file() -> Folder:
    files = models.target("ct")
    return Folder(files | {"model.safetensors": files["model.safetensors"][:-1]})


def untied() -> Folder:
    """No head is stored, and config.json does not say that it is the embedding."""
    files = models.target("ct")
    config = json.loads(files["config.json"])
    config["tie_word_embeddings"] = False
    return Folder(files | {"config.json": pretty(config)})


def mask_lies() -> Folder:
    """config.json says that attention stays in BF16; the file has it packed (a published recipe did)."""
    return told("ct", models.declared_ct(ignore=["lm_head", "re:.*self_attn.*"]))


def one_module_plain() -> Folder:
    return told("ct", models.declared_ct(), bf16=("1.mlp.down_proj",))


def companion_missing() -> Folder:
    tensors = models.tensors_of("ct")
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    return Folder(models.folder(tensors, models.declared_ct()))


def mtp_promised() -> Folder:
    config = models.text_config(mtp_num_hidden_layers=1)
    return Folder(models.folder(models.tensors_of("gptq"), models.declared_gptq(), config))


def speculators() -> Folder:
    return Folder(models.speculators_drafter())
