"""`distill`: QAD of the PTQ grid against the teacher; periodic latents as checkpoints."""

from __future__ import annotations

import shutil
from typing import Any

import torch
from safetensors.torch import load_file

from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import write_json
from qdc.core.stage import Context
from qdc.methods import qad, qwen
from qdc.methods.parallel import Group
from qdc.methods.student import Student, initial_latents, read_grid


def run(context: Context) -> None:
    """Writes checkpoints/step-*.safetensors and training.json. Resumes from the partial folder.

    Fails when there are no steps, when the student does not start on the grid, and when nothing was learned.
    """
    settings = context.params
    _check(settings)
    packed = load_file(context.inputs["data"] / "train.safetensors")
    if packed["input_ids"].shape[1] != int(settings["batch"]["sequence_length"]):
        raise QdcError("stage.distill.length", "the packed text has another length", exit_code=COULD_NOT)
    weights = qwen.read_weights(context.inputs["teacher"])
    config = qwen.read_config(context.inputs["teacher"])
    given = read_grid(context.inputs["grid"])
    start = initial_latents(weights, given, settings["trainable"])
    teacher = qwen.model_from(config, weights, device=context.device)
    student = Student(teacher, {name: tensor.clone() for name, tensor in start.items()}, given)
    gate = qad.check_start(teacher, student, given, packed, float(settings["loss"]["temperature"]))
    group = Group(context.rank, context.processes)
    log = qad.distill(teacher, student, packed, settings, context.partial, context.report, group)
    if not group.first:
        return
    if all(torch.equal(start[name], latent.detach().cpu()) for name, latent in student.latents.items()):
        raise QdcError("stage.distill.unchanged", "no weight changed in training", exit_code=COULD_NOT)
    shutil.copytree(context.partial / "checkpoints", context.output / "checkpoints")
    write_json(
        context.output / "training.json",
        {"log": log, "optimizer_steps": len(log), "start": gate, "trainable": sorted(student.latents)},
    )


def _check(settings: dict[str, Any]) -> None:
    if int(settings["schedule"]["steps"]) < 1 or int(settings["checkpoints"]["every"]) < 1:
        raise QdcError("stage.distill.steps", "a training of no steps", exit_code=COULD_NOT)
    kind = settings["loss"]["kind"]
    if kind != "forward-kl":
        raise QdcError("stage.distill.loss", f"no loss of kind {kind}", exit_code=COULD_NOT)
