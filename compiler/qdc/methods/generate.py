"""Greedy or sampled continuation of many prompts at once, with left padding.

Exact on hybrid models: every step gets the attention mask and explicit position ids, and padded positions are
zeroed before a recurrent layer. Knows token ids, not chats or folders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from qdc.methods.qwen import device_of, positions
from qdc.methods.qwen_model import Cache, Qwen

BATCH = 256


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy; `top_p` 1 and `top_k` 0 keep the whole distribution."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class Completion:
    """New token ids, the end token left out; `finish_reason` is "stop" or "length"."""

    ids: list[int]
    finish_reason: str


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> torch.Tensor:
    """Next token ids [B] from `logits` [B, V]. Order: temperature, top_k, top_p, as vLLM applies them.

    `generator` is the CPU's, whatever device the logits are on.
    """
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    scores = logits.float() / sampling.temperature
    if sampling.top_k > 0:
        smallest = scores.topk(min(sampling.top_k, scores.shape[-1]), dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < smallest, float("-inf"))
    if sampling.top_p < 1.0:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        chances = ordered.softmax(dim=-1)
        beyond = chances.cumsum(dim=-1) - chances >= sampling.top_p
        scores = scores.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), float("-inf"))
    return torch.multinomial(scores.softmax(dim=-1).cpu(), 1, generator=generator)[:, 0].to(logits.device)


def _one_batch(
    model: Qwen,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    eos_id: int,
    pad_id: int,
    generator: torch.Generator,
) -> list[Completion]:
    width = max(len(p) for p in prompts)
    device = device_of(model)
    ids = torch.tensor([[pad_id] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    cache = Cache()
    place = positions(mask)
    written: list[torch.Tensor] = []
    open_rows = torch.ones(len(prompts), dtype=torch.bool, device=device)
    for _ in range(sampling.max_tokens):
        logits = model(ids, mask, place, cache, last_only=True).logits[:, -1]
        token = choose(logits, sampling, generator)
        token = torch.where(open_rows, token, torch.full_like(token, eos_id))
        written.append(token)
        open_rows = open_rows & (token != eos_id)
        if not open_rows.any():
            break
        ids = token[:, None]
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
        place = place[:, -1:] + 1
    return [_cut(row, eos_id) for row in torch.stack(written, dim=1).tolist()]


def _cut(row: list[int], eos_id: int) -> Completion:
    if eos_id in row:
        return Completion(row[: row.index(eos_id)], "stop")
    return Completion(row, "length")


def generate(
    model: Qwen,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    eos_id: int,
    pad_id: int,
    report: Callable[[int, int, str], None],
    batch: int = BATCH,
) -> list[Completion]:
    """A completion of each prompt (token ids), in the prompts' order; prompts of like length run together."""
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    generator = torch.Generator().manual_seed(sampling.seed)
    results: dict[int, Completion] = {}
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        with torch.no_grad():
            done = _one_batch(model, [prompts[i] for i in rows], sampling, eos_id, pad_id, generator)
        results.update(zip(rows, done, strict=True))
        report(len(results), len(prompts), "conversations")
    return [results[i] for i in range(len(prompts))]
