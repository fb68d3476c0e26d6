"""`wrap-target`: the packed target in the form of a whole Qwen3.5, for engines whose registry has no class for less.

Names and configuration change, no tensor does: the proof of `pack-target` stays true.
"""

from __future__ import annotations

import json
import shutil

from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import write_json
from qdc.core.stage import Context
from qdc.formats import safetensors
from qdc.formats.qwen35 import whole_name, whole_of


def run(context: Context) -> None:
    """Input `target`, as pack-target writes it -> ct/, proof.json. Params: none."""
    source, folder = context.inputs["target"] / "ct", context.output / "ct"
    folder.mkdir()
    files = sorted(source.iterdir())
    for number, path in enumerate(files):
        context.report(number, len(files), path.name)
        if path.suffix == ".safetensors":
            header = safetensors.read_header(path)
            safetensors.copy(path, folder / path.name, {name: whole_name(name) for name in header.tensors})
        elif path.name == "config.json":
            write_json(folder / path.name, whole_of(json.loads(path.read_bytes())))
        elif path.name.endswith(".index.json"):
            raise QdcError("stage.wrap-target.shards", "a target in several files", file=path, exit_code=COULD_NOT)
        else:
            shutil.copyfile(path, folder / path.name)
    shutil.copyfile(context.inputs["target"] / "proof.json", context.output / "proof.json")
    context.report(len(files), len(files), "done")
