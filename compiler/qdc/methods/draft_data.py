"""Conversations as token ids for the drafter, and where its calibration blocks start. No torch.

A conversation's assistant part is what the target really emitted: its text and, unless the answer was cut by
the token limit, the end-of-turn token. Knows the corpus row format and the tokenizer; no stage, no recipe.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qdc.methods import documents
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


def calibration_anchors(tokens: int, prompt_tokens: int, draft_block_size: int, count: int) -> list[int]:
    """Up to `count` anchors evenly from the first answer token to tokens - block - 1; none without room.

    A conversation has room when tokens > prompt_tokens + block + 1.
    """
    first, last = prompt_tokens, tokens - draft_block_size - 1
    if last <= first:
        return []
    number = min(count, tokens - draft_block_size - prompt_tokens)
    if number == 1:
        return [first]
    return [round(first + (last - first) * i / (number - 1)) for i in range(number)]


def choose(rows: int, count: int, seed: int) -> list[int]:
    """`count` different row numbers (all, if fewer), in the order drawn."""
    return random.Random(seed).sample(range(rows), min(count, rows))
