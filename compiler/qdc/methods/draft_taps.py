"""Padded ids, and the target's taps over conversations. Knows tensors and token ids, no folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qdc.methods.draft_data import Conversation
from qdc.methods.qwen import forward_taps


def pad(rows: Sequence[Sequence[int]], fill: int = 0) -> tuple[Tensor, Tensor]:
    """Right-padded ids [B, S] (int64) and the mask of real tokens [B, S] (int64, 1 or 0)."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), fill, dtype=torch.int64)
    mask = torch.zeros((len(rows), longest), dtype=torch.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = 1
    return ids, mask


@contextmanager
def _only_to(model: nn.Module, layer: int) -> Iterator[None]:
    """Inside, the target ends after decoder layer `layer`: nothing above it reaches a tap."""
    whole = model.model.layers
    model.model.layers = whole[: layer + 1]
    try:
        yield
    finally:
        model.model.layers = whole


def target_taps(model: nn.Module, rows: Sequence[Sequence[int]], taps: Sequence[int]) -> Tensor:
    """Taps [B, S, len(taps) * hidden] of right-padded rows; padded positions hold numbers of no meaning."""
    ids, mask = pad(rows)
    with torch.no_grad(), _only_to(model, max(taps)):
        return forward_taps(model, ids, mask, taps)[1]


def all_taps(
    model: nn.Module, conversations: Sequence[Conversation], taps: Sequence[int], batch: int = 64
) -> list[Tensor]:
    """Taps [tokens, len(taps) * hidden] of each conversation, one target pass over all of them.

    Conversations of like length run together; the grouping depends on the lengths alone.
    """
    order = sorted(range(len(conversations)), key=lambda i: (len(conversations[i].input_ids), i))
    found: list[Tensor] = [torch.empty(0)] * len(order)
    for start in range(0, len(order), batch):
        some = order[start : start + batch]
        out = target_taps(model, [conversations[i].input_ids for i in some], taps)
        for row, index in enumerate(some):
            found[index] = out[row, : len(conversations[index].input_ids)].clone()
    return found
