"""Quantization-aware distillation: forward KL on all tokens, latents trained through a frozen grid.

Knows models, grids and packed text; of folders only the place for resumable state and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from qdc.core.errors import COULD_NOT, QdcError
from qdc.methods import grid, qwen, training
from qdc.methods.divergence import CHUNK_TOKENS
from qdc.methods.parallel import ALONE, Group
from qdc.methods.qwen_model import Qwen
from qdc.methods.student import Grid, Student, counted_tokens, text_kl

MICRO_TOKENS = 4096
GATE_SEQUENCES = 4


def check_start(
    teacher: Qwen, student: Student, given: Grid, packed: dict[str, torch.Tensor], temperature: float
) -> dict[str, float]:
    """The gate at step 0: KL of the fake-quantized student equals that of the dense dequantized model.

    Both in nats a token on the first sequences. Raises QdcError `stage.distill.start` when they differ by more
    than float noise: then the latents are not on the grid that was given.
    """
    ids = packed["input_ids"][:GATE_SEQUENCES].long()
    counted = counted_tokens(packed["length"][:GATE_SEQUENCES], ids.shape[1])
    dense = {f"{module}.weight": grid.decode(*pair).float() for module, pair in given.items()}
    with torch.no_grad():
        ours = text_kl((teacher, {}), student.weighted(), ids, counted, temperature).mean().item()
        reference = text_kl((teacher, {}), (student.model, dense), ids, counted, temperature).mean().item()
    if not abs(ours - reference) <= 1e-7 + 1e-4 * abs(reference):
        raise QdcError(
            "stage.distill.start",
            f"at step 0 the student's KL is {ours:.3e}, that of the dequantized grid {reference:.3e}",
            exit_code=COULD_NOT,
        )
    return {"student": ours, "dequantized": reference}


def _backward(
    teacher: Qwen,
    student: Student,
    ids: torch.Tensor,
    counted: torch.Tensor,
    temperature: float,
    chunk_tokens: int,
    group: Group,
) -> float:
    """Mean KL over the batch's counted tokens; gradients are those of that mean, whatever the micro-batches.

    Of several processes each adds its share of the rows: both are sums over `group` then.
    """
    total, loss = int(counted.sum()), 0.0
    ids, counted = ids[group.rank :: group.size], counted[group.rank :: group.size]
    size = max(1, MICRO_TOKENS // ids.shape[1])
    for start in range(0, len(ids), size):
        rows = slice(start, start + size)
        each = text_kl((teacher, {}), student.weighted(), ids[rows], counted[rows], temperature, chunk_tokens)
        part = each.sum() / total
        part.backward()
        loss += part.item()
    return loss


def distill(
    teacher: Qwen,
    student: Student,
    packed: dict[str, torch.Tensor],
    settings: dict[str, Any],
    partial: Path,
    report: Callable[[int, int, str], None],
    group: Group = ALONE,
) -> list[dict[str, Any]]:
    """Train the student's latents in place; checkpoints go to `partial / "checkpoints"`. One log row a step.

    Of several processes the first writes; `partial` is one folder for all.

    `settings`: a recipe's `qad`. The gradient is the mean over the effective batch; with `clip_of: sum` its norm is
    limited to `grad_clip / batch.effective`, which is the sum's limit for an optimizer that scale does not change.
    """
    matrices = [name for name in student.latents if name in student.scales]
    optimizers = training.Optimizers(student.latents, settings["optimizer"], matrices)
    log = training.load_partial(partial, student.latents, optimizers)
    steps, size = int(settings["schedule"]["steps"]), int(settings["batch"]["effective"])
    limit = float(settings["grad_clip"]) / (size if settings["clip_of"] == "sum" else 1)
    every, temperature = int(settings["checkpoints"]["every"]), float(settings["loss"]["temperature"])
    chunk = int(settings.get("kl_chunk_tokens") or CHUNK_TOKENS)
    all_ids = packed["input_ids"].long()
    all_counted = counted_tokens(packed["length"], all_ids.shape[1])
    for step in range(len(log), steps):
        rows = training.batch_rows(len(all_ids), size, step, int(settings["seed"]))
        loss = _backward(teacher, student, all_ids[rows], all_counted[rows], temperature, chunk, group)
        loss = group.total(loss, qwen.device_of(teacher))
        training.check_loss(loss, step, "distill")
        factor = training.schedule_factor(settings["schedule"], step, steps)
        norm = optimizers.step(factor, limit, group)
        log.append({"step": step + 1, "loss": loss, "lr": optimizers.peak * factor, "norm": norm})
        if group.first and ((step + 1) % every == 0 or step + 1 == steps):
            write_checkpoint(partial / "checkpoints", step + 1, student)
            training.save_partial(partial, student.latents, optimizers, log)
        report(step + 1, steps, f"KL {loss:.5f}")
    return log


def write_checkpoint(folder: Path, step: int, student: Student) -> None:
    """`step-<6 digits>.safetensors`: every latent, FP32, under the model's tensor names."""
    folder.mkdir(parents=True, exist_ok=True)
    latents = {name: latent.detach().contiguous() for name, latent in student.latents.items()}
    save_file(latents, folder / f"step-{step:06d}.safetensors")
