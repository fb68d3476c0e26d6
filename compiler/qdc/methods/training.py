"""What every training loop here shares: optimizers, schedules, batch order, and resumable state on disk.

State is safetensors and JSON, never pickle; a resumed run continues bit for bit. Knows parameters by name,
not models, losses or stages.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from qdc.core import canonical
from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import write_atomic
from qdc.methods.parallel import ALONE, Group

Named = dict[str, torch.nn.Parameter]


def schedule_factor(schedule: dict[str, Any], step: int, total: int) -> float:
    """Share of the peak rate at `step` (0-based) of `total`: linear warm-up, then cosine to `final_ratio`.

    Warm-up length is `warmup_steps`, or `warmup_ratio` of the total.
    """
    if schedule["kind"] != "cosine":
        raise QdcError("methods.training.schedule", f"no schedule of kind {schedule['kind']}", exit_code=COULD_NOT)
    if "warmup_steps" in schedule:
        warmup = int(schedule["warmup_steps"])
    else:
        warmup = int(schedule.get("warmup_ratio", 0.0) * total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    final = float(schedule.get("final_ratio", 0.0))
    done = (step - warmup) / max(1, total - warmup)
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * done))


class Optimizers:
    """AdamW for everything, or Muon (torch 2.13, `match_rms_adamw`) for hidden matrices and AdamW for the rest.

    `matrices`: names that Muon takes (kind muon only). Weight decay falls on matrices alone.
    """

    def __init__(self, named: Named, settings: dict[str, Any], matrices: Iterable[str]) -> None:
        kind = settings["kind"]
        if kind not in ("adamw", "muon"):
            raise QdcError("methods.training.optimizer", f"no optimizer of kind {kind}", exit_code=COULD_NOT)
        self.named = dict(sorted(named.items()))
        self.peak = float(settings["lr"])
        betas = tuple(float(b) for b in settings.get("betas", (0.9, 0.95)))
        decay = float(settings["weight_decay"])
        chosen = set(matrices) & set(self.named)
        hidden = [p for n, p in self.named.items() if n in chosen]
        rest = [p for n, p in self.named.items() if n not in chosen]
        self.parts: list[Any] = []
        if hidden and kind == "muon":
            momentum = float(settings["momentum"])
            muon = torch.optim.Muon(
                hidden,
                lr=self.peak,
                momentum=momentum,
                weight_decay=decay,
                adjust_lr_fn="match_rms_adamw",
            )
            self.parts.append(muon)
        elif hidden:
            self.parts.append(torch.optim.AdamW(hidden, lr=self.peak, betas=betas, weight_decay=decay))
        if rest:
            self.parts.append(torch.optim.AdamW(rest, lr=self.peak, betas=betas, weight_decay=0.0))

    def step(self, factor: float, grad_clip: float, group: Group = ALONE) -> float:
        """Add the gradients of all processes, clip their global norm, update, clear; the norm before clipping."""
        group.add_gradients(self.named.values())
        norm = torch.nn.utils.clip_grad_norm_(self.named.values(), grad_clip)
        for part in self.parts:
            for settings in part.param_groups:
                settings["lr"] = self.peak * factor
            part.step()
            part.zero_grad(set_to_none=True)
        return float(norm)

    def state(self) -> dict[str, torch.Tensor]:
        """Optimizer state as `<parameter>|<key>` tensors."""
        tensors = {}
        for part in self.parts:
            for name, parameter in self.named.items():
                for key, value in part.state.get(parameter, {}).items():
                    tensors[f"{name}|{key}"] = value
        return tensors

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Put back what `state` gave."""
        owner = {id(p): part for part in self.parts for g in part.param_groups for p in g["params"]}
        for joined, value in tensors.items():
            name, key = joined.rsplit("|", 1)
            parameter = self.named[name]
            moved = value.to(parameter.device) if value.shape == parameter.shape else value
            owner[id(parameter)].state[parameter][key] = moved


def batch_rows(count: int, size: int, step: int, seed: int) -> list[int]:
    """Rows of batch `step`: epochs are seeded permutations laid end to end, so any step can be asked for alone."""
    rows: list[int] = []
    position = step * size
    while len(rows) < size:
        epoch, offset = divmod(position + len(rows), count)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        rows.extend(order[offset : offset + size - len(rows)].tolist())
    return rows


def save_partial(folder: Path, named: Named, optimizers: Optimizers, log: list[dict[str, Any]]) -> None:
    """Write the state after `len(log)` steps; a kill at any instant leaves the previous or the new one whole."""
    step = len(log)
    final, staged = folder / f"state-{step:06d}", folder / f".state-{step:06d}"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    weights = {n: p.detach().contiguous() for n, p in sorted(named.items())}
    save_file(weights, staged / "weights.safetensors")
    state = {n: t.contiguous() for n, t in sorted(optimizers.state().items())}
    save_file(state, staged / "optimizer.safetensors")
    write_atomic(staged / "log.json", canonical.dumps(log))
    for file in staged.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    shutil.rmtree(final, ignore_errors=True)
    os.replace(staged, final)
    for old in sorted(folder.glob("state-*")):
        if old != final:
            shutil.rmtree(old)


def load_partial(folder: Path, named: Named, optimizers: Optimizers) -> list[dict[str, Any]]:
    """Restore the newest state, if there is one, into parameters and optimizers; returns its log (or [])."""
    states = sorted(folder.glob("state-*")) if folder.is_dir() else []
    if not states:
        return []
    weights = load_file(states[-1] / "weights.safetensors")
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(weights[name])
    optimizers.load(load_file(states[-1] / "optimizer.safetensors"))
    log: list[dict[str, Any]] = json.loads((states[-1] / "log.json").read_text())
    return log


def check_loss(loss: float, step: int, stage: str) -> None:
    """Raises QdcError `stage.<stage>.diverged` when the loss is not a number."""
    if not math.isfinite(loss):
        raise QdcError(f"stage.{stage}.diverged", f"the loss is {loss} at step {step}", exit_code=COULD_NOT)
