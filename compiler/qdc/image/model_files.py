"""The files of a model folder in the image that are not weights: configurations, tokenizer, chat template.

Weights and configurations lie in different layers, so that what a configuration says (the window, the chat
template) never touches weights. This module does not know stages or manifests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdc.core import canonical
from qdc.core.errors import COULD_NOT, QdcError
from qdc.formats.dflash import drafter_config, read_drafter_config

TEMPLATE = "chat_template.jinja"
TOKENIZER = "tokenizer.json"
_RENDERED = ("config.json", "generation_config.json", TEMPLATE, "tokenizer_config.json")
_KINDS = (".json", ".jinja", ".txt", ".model")


@dataclass(frozen=True)
class ModelFiles:
    """`rendered`: name -> bytes, made or copied here; `kept`: name -> file, as large as a tokenizer may be."""

    rendered: dict[str, bytes]
    kept: dict[str, Path]


def target_files(folder: Path, chat_template: str) -> ModelFiles:
    """Everything of the target's `folder` but its weights, with the recipe's chat template as the only one.

    Raises QdcError `stage.image.target` at a file that no engine needs to read (code, pickles).
    """
    rendered: dict[str, bytes] = {}
    kept: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            continue
        if not path.is_file() or path.suffix not in _KINDS:
            raise QdcError(
                "stage.image.target",
                f"{path.name} has no place in a model folder of the image",
                file=folder,
                exit_code=COULD_NOT,
            )
        if path.name in _RENDERED:
            rendered[path.name] = path.read_bytes()
        else:
            kept[path.name] = path
    for name in ("config.json", TOKENIZER):
        if name not in rendered and name not in kept:
            raise QdcError("stage.image.target", f"{name} is missing", file=folder, exit_code=COULD_NOT)
    rendered[TEMPLATE] = chat_template.encode()
    if settings := rendered.get("tokenizer_config.json"):
        value = json.loads(settings)
        if value.pop("chat_template", None) is not None:
            rendered["tokenizer_config.json"] = canonical.pretty(value)
    return ModelFiles(rendered, kept)


def drafter_files(folder: Path, drafter: Mapping[str, Any]) -> ModelFiles:
    """The drafter's config.json with the recipe's window, and the index of its weights if it has one.

    `drafter`: the recipe's drafter section. Raises QdcError `stage.image.drafter` where the recipe and the
    drafter that was trained differ in anything but the window.
    """
    stored = json.loads((folder / "config.json").read_bytes())
    read_drafter_config(stored)
    ptq = drafter.get("ptq")

    def render(window: int | None) -> dict[str, Any]:
        return drafter_config(
            drafter["architecture"],
            target_layers=stored["num_target_layers"],
            vocab_size=stored["vocab_size"],
            mask_token_id=stored["dflash_config"]["mask_token_id"],
            window=window,
            quantization={"scheme": ptq["scheme"], "ignore": ptq.get("ignore") or []} if ptq else None,
        )

    plain = render(None)
    if plain != stored:
        differing = sorted(
            name for name in {*plain, *stored} if plain.get(name, "absent") != stored.get(name, "absent")
        )
        raise QdcError(
            "stage.image.drafter",
            f"the drafter was made otherwise than the recipe says: {', '.join(differing)}",
            file=folder / "config.json",
            exit_code=COULD_NOT,
        )
    index = "model.safetensors.index.json"
    kept = {index: folder / index} if (folder / index).is_file() else {}
    window = (drafter.get("swa") or {}).get("window")
    return ModelFiles({"config.json": canonical.pretty(render(window))}, kept)
