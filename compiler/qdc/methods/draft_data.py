"""Conversations as token ids for the drafter, and the target's taps over them.

A conversation's assistant part is what the target really emitted: its text and, unless the answer was cut by
the token limit, the end-of-turn token. Knows the corpus row format and the tokenizer; no stage, no recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qdc.methods import documents
from qdc.methods.qwen import forward_taps
from qdc.methods.tokenizer import Tokenizer


@dataclass(frozen=True)
class Conversation:
    """`input_ids`: prompt, then answer; `prompt_tokens`: how many are prompt (the assistant header too)."""

    id: str
    input_ids: tuple[int, ...]
    prompt_tokens: int

    def answer_tokens(self) -> int:
        return len(self.input_ids) - self.prompt_tokens


def encode_rows(rows: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> list[Conversation]:
    """Ids of corpus rows {id, messages, finish_reason}; the last message is the answer.

    What the template writes after the end of turn is left out. Raises QdcError as `documents.conversations`.
    """
    chats = [row["messages"] for row in rows]
    finished = [row["finish_reason"] == "stop" for row in rows]
    found = []
    for row, document in zip(rows, documents.conversations(tokenizer, chats, finished), strict=True):
        prompt = document.assistant.index(1) if 1 in document.assistant else len(document.ids)
        end = prompt + sum(document.assistant)
        found.append(Conversation(str(row["id"]), tuple(document.ids[:end]), prompt))
    return found


def cut(conversation: Conversation, max_length: int) -> Conversation:
    """The first `max_length` tokens."""
    return Conversation(conversation.id, conversation.input_ids[:max_length], conversation.prompt_tokens)


def pad(rows: Sequence[Sequence[int]], fill: int = 0) -> tuple[Tensor, Tensor]:
    """Right-padded ids [B, S] (int64) and the mask of real tokens [B, S] (int64, 1 or 0)."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), fill, dtype=torch.int64)
    mask = torch.zeros((len(rows), longest), dtype=torch.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = 1
    return ids, mask


def target_taps(model: nn.Module, rows: Sequence[Sequence[int]], taps: Sequence[int]) -> Tensor:
    """Taps [B, S, len(taps) * hidden] of right-padded rows; padded positions hold numbers of no meaning."""
    ids, mask = pad(rows)
    with torch.no_grad():
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
