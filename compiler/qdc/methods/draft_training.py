"""Training a DFlash drafter: anchors, decayed loss, optimizer, and steps that resume bit by bit.

Objective (DFlash; z-lab's training): uniform anchors in the answers, all blocks of a conversation in
parallel, slot j of the block at s predicts the data token s + j, hard-label cross entropy weighted by
exp(-(j - 1) / gamma).
The target, its embedding and its head are frozen. Knows tensors only: no folder, no recipe, no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qdc.methods.dflash import Drafter, block_positions, block_tokens
from qdc.methods.parallel import ALONE, Group
from qdc.methods.training import Optimizers, batch_rows, check_loss, schedule_factor


@dataclass(frozen=True)
class Batch:
    """`input_ids` int64 [B, S], right-padded; `assistant` bool [B, S]; `taps` [R, S, len(taps) * hidden].

    The taps are those of the batch's `rows` (all of them, or one process's share) and lie where the drafter is; the
    others on the CPU.
    """

    input_ids: Tensor
    assistant: Tensor
    taps: Tensor
    rows: slice = field(default_factory=lambda: slice(None))


@dataclass(frozen=True)
class Frozen:
    """The target's embedding and head, each [vocab, hidden]."""

    embedding: Tensor
    head: Tensor


def sample_anchors(assistant: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Anchors [B, A] int64 and which are real [B, A] bool; A = min(count, most candidates in a row).

    Uniform without replacement over assistant positions that an assistant token follows.
    `assistant` bool [B, S].
    """
    candidates = torch.zeros_like(assistant)
    candidates[:, :-1] = assistant[:, :-1] & assistant[:, 1:]
    width = min(count, int(candidates.sum(1).max()))
    draw = torch.rand(assistant.shape, generator=generator).masked_fill(~candidates, -1.0)
    best, anchors = draw.topk(width, dim=1)
    valid = best >= 0
    return anchors.masked_fill(~valid, 0), valid


def decay_weights(draft_block_size: int, gamma: float) -> Tensor:
    """Weight of each slot: 0 for the anchor, then exp(-(j - 1) / gamma)."""
    slots = torch.arange(draft_block_size, dtype=torch.float32)
    return torch.exp(-(slots - 1) / gamma).masked_fill(slots == 0, 0.0)


def labels_and_weights(
    batch: Batch, anchors: Tensor, valid: Tensor, draft_block_size: int, gamma: float
) -> tuple[Tensor, Tensor]:
    """Label of every slot and its loss weight, [B, A, D]; the weight is 0 outside the answer."""
    positions = block_positions(anchors, draft_block_size)
    inside = positions < batch.input_ids.shape[1]
    positions = positions.clamp(max=batch.input_ids.shape[1] - 1)
    shape = (*anchors.shape, draft_block_size)
    labels = batch.input_ids.gather(1, positions).view(shape)
    counted = (batch.assistant.gather(1, positions) & inside).view(shape) & valid.unsqueeze(-1)
    return labels, counted * decay_weights(draft_block_size, gamma)


def block_loss(drafter: Drafter, frozen: Frozen, batch: Batch, anchors: Tensor, valid: Tensor, gamma: float) -> Tensor:
    """sum(w * CE) / (sum(w) + 1e-6) over all slots of all blocks; a scalar. The second sum is that of the whole batch,
    where `batch` has the taps of some of its rows only: those that `batch.rows` names.
    """
    block, device, rows = drafter.shape.draft_block_size, batch.taps.device, batch.rows
    labels, weights = labels_and_weights(batch, anchors, valid, block, gamma)
    whole = weights.sum() + 1e-6
    tokens = block_tokens(batch.input_ids.gather(1, anchors), block, drafter.shape.mask_token_id)
    labels, weights, tokens = labels[rows].to(device), weights[rows].to(device), tokens[rows].to(device)
    hidden = drafter(
        batch.taps,
        F.embedding(tokens, frozen.embedding),
        anchors[rows].to(device),
        block,
    )
    counted = weights > 0
    logits = F.linear(hidden.view(*labels.shape, -1)[counted], frozen.head)
    losses = F.cross_entropy(logits.float(), labels[counted], reduction="none")
    return (losses * weights[counted]).sum() / whole.to(device)


@dataclass(frozen=True)
class Plan:
    """`steps` optimizer steps of `conversations` rows with up to `anchors` blocks each; gamma `loss_decay`.

    `schedule`: see `training.schedule_factor`. `grad_clip` bounds the global norm of the mean gradient.
    What step n draws is a function of (seed, n), so that any step can be resumed.
    """

    steps: int
    conversations: int
    anchors: int
    loss_decay: float
    schedule: dict[str, Any]
    grad_clip: float
    seed: int


def train(
    drafter: Drafter,
    frozen: Frozen,
    batch_of: Callable[[list[int]], Batch],
    rows: int,
    plan: Plan,
    optimizers: Optimizers,
    log: list[dict[str, Any]],
    after_step: Callable[[list[dict[str, Any]]], None],
    group: Group = ALONE,
) -> None:
    """Train in place from step len(log), in BF16 autocast over FP32 weights; each step adds a line to `log`.

    `batch_of` gives the batch of row numbers in 0..rows-1, with the taps of this process's share of it;
    `after_step(log)` follows each step. Raises QdcError when the loss is not finite.
    """
    for step in range(len(log), plan.steps):
        batch = batch_of(batch_rows(rows, plan.conversations, step, plan.seed))
        generator = torch.Generator().manual_seed((plan.seed + 1) * 1_000_003 + step)
        anchors, valid = sample_anchors(batch.assistant, plan.anchors, generator)
        part = 0.0
        if len(batch.taps):  # a small batch may leave a process without rows
            with torch.autocast(batch.taps.device.type, dtype=torch.bfloat16):
                loss = block_loss(drafter, frozen, batch, anchors, valid, plan.loss_decay)
            loss.backward()
            part = float(loss.detach())
        value = group.total(part, batch.taps.device)
        check_loss(value, step, "draft-train")
        factor = schedule_factor(plan.schedule, step, plan.steps)
        norm = optimizers.step(factor, plan.grad_clip, group)
        log.append({"step": step + 1, "loss": value, "lr": optimizers.peak * factor, "gradient_norm": norm})
        after_step(log)
