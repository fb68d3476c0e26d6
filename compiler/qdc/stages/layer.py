"""`layer`: the weights of a model as a virtual layer; only what the engine loads, and only safetensors.

Nothing is copied: entries name contents by SHA-256, and the store has them already.
"""

from __future__ import annotations

import json
from pathlib import Path

from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.stage import Context
from qdc.image.layers import digested, write_layer_json


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that an engine loads from a model folder, sorted.

    Those of the index where there is one, else `model.safetensors`.

    Raises QdcError `stage.layer.weights` when there are none or one that the index names is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    for name in names:
        if "/" in name or not name.endswith(".safetensors") or not (folder / name).is_file():
            raise QdcError(
                "stage.layer.weights", f"the weights {name!r} are not here", file=folder, exit_code=COULD_NOT
            )
    return [folder / name for name in names]


def run(context: Context) -> None:
    """Params `{folder, prefix}`: the model folder inside input `weights`, and where it goes in the image."""
    folder = context.inputs["weights"] / context.params["folder"]
    prefix = context.params["prefix"].strip("/")
    context.report(0, 1, "digest the weights")
    layer = digested({f"{prefix}/{path.name}": path for path in weight_files(folder)}, prefix.rpartition("/")[2])
    write_layer_json(context.output, layer)
    context.report(1, 1, "done")
