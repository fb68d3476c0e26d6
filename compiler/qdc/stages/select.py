"""`select`: the QAD checkpoint with the least KL on held-out text, and the whole table it was chosen from."""

from __future__ import annotations

import shutil
from typing import Any

import torch
from safetensors.torch import load_file

from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import write_json
from qdc.core.stage import Context
from qdc.methods import grid, qwen
from qdc.methods.student import Student, heldout_kl, read_grid


def run(context: Context) -> None:
    """Writes selected.safetensors (the chosen latents) and selection.json. Ties go to the earlier step."""
    params = context.params
    if params["metric"] != "heldout-kl":
        raise QdcError("stage.select.metric", f"no metric {params['metric']}", exit_code=COULD_NOT)
    teacher = qwen.load_model(context.inputs["teacher"], device=context.device)
    given = read_grid(context.inputs["grid"])
    packed = load_file(context.inputs["data"] / "heldout.safetensors")
    files = sorted((context.inputs["checkpoints"] / "checkpoints").glob("step-*.safetensors"))
    if not files:
        raise QdcError("stage.select.none", "there is no checkpoint to select from", exit_code=COULD_NOT)

    def measured(served: dict[str, torch.Tensor]) -> tuple[float, int]:
        each = heldout_kl((teacher, {}), (teacher, served), packed, float(params["temperature"]))
        flat = torch.cat(each)
        return flat.double().mean().item(), len(flat)

    table: list[dict[str, Any]] = []
    for index, file in enumerate(files):
        with torch.no_grad():
            served = Student(teacher, load_file(file), given).served()
        kl, tokens = measured(served)
        table.append({"step": int(file.stem.removeprefix("step-")), "kl": kl, "tokens": tokens})
        context.report(index + 1, len(files), f"KL {kl:.5f}")
    ptq_kl, _ = measured({f"{m}.weight": grid.decode(*pair).float() for m, pair in given.items()})
    best = min(table, key=lambda row: (row["kl"], row["step"]))
    shutil.copyfile(files[table.index(best)], context.output / "selected.safetensors")
    write_json(
        context.output / "selection.json",
        {"metric": params["metric"], "ptq_kl": ptq_kl, "selected": best["step"], "table": table},
    )
