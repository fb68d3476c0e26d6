"""Conversations as token ids, and ids packed into chunks of one length. No torch.

A conversation is coded in two pieces, the prompt with its generation header and what follows, as an engine sees
it; documents are joined with one separator each and cut, without a document mask.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qdc.core.errors import COULD_NOT, QdcError
from qdc.methods.tokenizer import Tokenizer


@dataclass(frozen=True)
class Document:
    """Token ids; `assistant[i]` is 1 where token i was written by the assistant (its end of turn included)."""

    ids: list[int]
    assistant: list[int]


@dataclass(frozen=True)
class Packed:
    """`input_ids` int32 [N, T], `assistant_mask` uint8 [N, T], `length` int32 [N] (tokens before padding)."""

    input_ids: npt.NDArray[np.int32]
    assistant_mask: npt.NDArray[np.uint8]
    length: npt.NDArray[np.int32]


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file. Raises QdcError with the line's number for a malformed one."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise QdcError(
                    "methods.documents.row",
                    f"not a JSON row: {error}",
                    file=file,
                    line=number,
                    exit_code=COULD_NOT,
                ) from error
            yield row


def conversations(
    tokenizer: Tokenizer, chats: Sequence[Sequence[dict[str, str]]], finished: Sequence[bool]
) -> list[Document]:
    """One document a chat whose last turn is the assistant's.

    An unfinished answer (cut by a token limit) ends where it was cut: no end of turn is invented for it.
    Raises QdcError if the chat template does not begin a full chat with its generation prompt.
    """
    heads, tails = [], []
    for chat, whole in zip(chats, finished, strict=True):
        head = tokenizer.render_chat(chat[:-1], add_generation_prompt=True)
        full = tokenizer.render_chat(chat)
        if chat[-1]["role"] != "assistant" or not full.startswith(head):
            raise QdcError(
                "methods.documents.template",
                "a rendered chat does not begin with its own generation prompt",
                exit_code=COULD_NOT,
            )
        heads.append(head)
        tails.append(full[len(head) :] if whole else chat[-1]["content"])
    documents = []
    for prompt, answer in zip(tokenizer.encode_many(heads), tokenizer.encode_many(tails), strict=True):
        written = answer.index(tokenizer.eos_id) + 1 if tokenizer.eos_id in answer else len(answer)
        mask = [0] * len(prompt) + [1] * written + [0] * (len(answer) - written)
        documents.append(Document(prompt + answer, mask))
    return documents


def pack(documents: Iterable[Document], length: int, separator: int, padding: int) -> Packed:
    """Join documents, one separator after each, and cut every `length` tokens; only the last chunk is padded."""
    ids: list[int] = []
    mask: list[int] = []
    for document in documents:
        ids += [*document.ids, separator]
        mask += [*document.assistant, 0]
    total = len(ids)
    chunks = -(-total // length)
    ids += [padding] * (chunks * length - total)
    mask += [0] * (chunks * length - total)
    lengths = np.full(chunks, length, dtype=np.int32)
    if chunks:
        lengths[-1] = total - (chunks - 1) * length
    return Packed(
        np.asarray(ids, dtype=np.int32).reshape(chunks, length),
        np.asarray(mask, dtype=np.uint8).reshape(chunks, length),
        lengths,
    )
