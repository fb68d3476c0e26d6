"""Next-token training of a small model from scratch on packed chats.

Knows tensors and settings; folders only as a place for resumable state.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from qdc.methods import training
from qdc.methods.qwen_model import Qwen

SAVE_EVERY = 100


def token_loss(
    logits: torch.Tensor, input_ids: torch.Tensor, assistant: torch.Tensor, prompt_weight: float
) -> torch.Tensor:
    """Weighted mean next-token cross-entropy: weight 1 where the next token is the assistant's, else less.

    `logits` [B, T, V], `input_ids` and `assistant` [B, T]; tokens with `assistant` < 0 (padding) weigh nothing.
    """
    target = input_ids[:, 1:].flatten()
    weight = torch.where(assistant[:, 1:] > 0, 1.0, prompt_weight) * (assistant[:, 1:] >= 0)
    each = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), target, reduction="none")
    return (each * weight.flatten()).sum() / weight.sum()


def matrices(model: torch.nn.Module) -> list[str]:
    """Names of the weights of hidden Linear modules: what Muon takes."""
    return [
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]


def pretrain(
    model: Qwen,
    input_ids: torch.Tensor,
    assistant: torch.Tensor,
    settings: dict[str, Any],
    partial: Path,
    report: Callable[[int, int, str], None],
) -> list[dict[str, Any]]:
    """Train `model` in place on `input_ids` [N, T] and `assistant` [N, T] (-1 padding, 0 prompt, 1 assistant).

    `settings`: a recipe's `training`. Returns one log row a step. Continues from `partial` if it holds a state.
    """
    named = dict(model.named_parameters())
    optimizers = training.Optimizers(named, settings["optimizer"], matrices(model))
    log = training.load_partial(partial, named, optimizers)
    steps, size = int(settings["steps"]), int(settings["batch"]["sequences"])
    device = next(iter(named.values())).device
    low = settings["precision"] == "bf16-autocast"
    for step in range(len(log), steps):
        rows = training.batch_rows(len(input_ids), size, step, int(settings["seed"]))
        ids = input_ids[rows].to(device)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=low):
            logits = model(ids).logits
        loss = token_loss(logits, ids, assistant[rows].to(device), float(settings["prompt_loss_weight"]))
        loss.backward()
        training.check_loss(loss.item(), step, "base")
        factor = training.schedule_factor(settings["schedule"], step, steps)
        norm = optimizers.step(factor, float(settings["grad_clip"]))
        log.append({"step": step + 1, "loss": loss.item(), "lr": optimizers.peak * factor, "norm": norm})
        if (step + 1) % SAVE_EVERY == 0 and step + 1 < steps:
            training.save_partial(partial, named, optimizers, log)
        report(step + 1, steps, f"loss {loss.item():.3f}")
    return log
