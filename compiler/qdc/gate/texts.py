"""What the gate asks: chat requests from given or built-in prompts, and conversations that fill the context.

Pure functions. Knows the shape of chat messages, not the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count, product
from typing import Any

Messages = list[dict[str, str]]
CHAT = "/v1/chat/completions"

_WHO = ("Ann", "Ben", "Eva", "Tom", "Lea", "Max")
_WHAT = ("apples", "books", "coins", "stamps", "eggs")
_ASK = (
    "{who} has {a} {what} and gets {b} more. How many {what} does {who} have?",
    "{who} had {b} {what} and gave {a} away. How many {what} are left?",
    "Write one sentence about {who}, {a} {what} and a garden.",
    "Which is more: {a} {what} or {b} {what}?",
)


SHOWN_LOGITS = 5
"""How many of the highest logits are asked for: more than two tokens may tie."""


def built_in(wanted: int) -> list[Messages]:
    """`wanted` different short conversations of one user message, always the same ones."""
    found: list[Messages] = []
    for number in count():
        for ask, who, what in product(_ASK, _WHO, _WHAT):
            if len(found) >= wanted:
                return found
            a, b = 2 + (len(found) * 3 + number) % 9, 11 + (len(found) * 7 + number) % 9
            found.append([{"role": "user", "content": ask.format(who=who, what=what, a=a, b=b)}])
    raise AssertionError("unreachable")


_LONG = (
    "Find all whole numbers n from 1 to {n} for which n * n + n + {a} is divisible by {b}. Explain each step.",
    "How many ways are there to write {n} as a sum of two primes? List them, and explain each step.",
    "{a} people share {n} coins so that each has at least {b}. In how many ways can they? Explain each step.",
    "A train travels {n} km, the first {a} km at {b} km/h, the rest twice as fast. How long does it take? Explain.",
)


def long_answers(wanted: int) -> list[Messages]:
    """`wanted` different questions that take a long answer, always the same ones."""
    asks = (
        _LONG[number % len(_LONG)].format(n=90 + 7 * number, a=3 + number, b=5 + number) for number in range(wanted)
    )
    return [[{"role": "user", "content": ask}] for ask in asks]


def chat(model: str | None, messages: Messages, path: str = CHAT, **more: Any) -> dict[str, Any]:
    """A greedy chat request that answers with token IDs. Without `max_tokens` it may run to the context's end."""
    body = {"messages": messages, "temperature": 0.0, "return_token_ids": True, **more}
    return {"method": "POST", "path": path, "body": {**_named(model), **body}}


def _named(model: str | None) -> dict[str, Any]:
    return {} if model is None else {"model": model}


def with_logits(request: Mapping[str, Any]) -> dict[str, Any]:
    """The same request, answering each token's highest logits too (on a server with raw logits)."""
    more = {"logprobs": True, "top_logprobs": SHOWN_LOGITS, "return_tokens_as_token_ids": True}
    return {**request, "body": {**request["body"], **more}}


def tokenize(model: str | None, messages: Messages) -> dict[str, Any]:
    """A request for the number of prompt tokens of `messages`."""
    return {"method": "POST", "path": "/tokenize", "body": {**_named(model), "messages": messages}}


def long_conversations(turns: Sequence[tuple[Messages, str, int]], limit: int, variants: int) -> list[Messages]:
    """Multi-turn conversations whose prompts end about `limit` tokens; their true lengths must still be asked.

    `turns`: (messages, answer, tokens of both). From each of eight starts: whole turns while they fit, then one user
    message that grows by a word a variant.
    """
    found: list[Messages] = []
    for start in sorted({len(turns) * part // 8 for part in range(8)}):
        ordered = [*turns[start:], *turns[:start]]
        head: Messages = []
        used = number = 0
        while used + 2 * ordered[number % len(ordered)][2] < limit:
            messages, answer, tokens = ordered[number % len(ordered)]
            head += [*messages, {"role": "assistant", "content": answer}]
            used += tokens
            number += 1
        words = " ".join(turn[0][-1]["content"] for turn in ordered[number : number + 20] or ordered).split()
        found += [
            [*head, {"role": "user", "content": " ".join(words[:length])}]
            for length in range(1, min(variants, len(words)) + 1)
        ]
    return found
