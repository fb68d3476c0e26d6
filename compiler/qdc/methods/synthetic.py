"""Text made by rule: short chat problems whose answers can be checked, for recipes that need no download.

`arithmetic-chat`: word problems of one or two sums, and lists to be reversed. Every number is below 100,
so that a tokenizer may give each its own token. No torch here; nothing is known of folders.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from qdc.core.errors import COULD_NOT, QdcError

NAMES = (
    *("Tom", "Ann", "Sam", "Eva", "Leo", "Mia", "Ben", "Ida", "Max", "Zoe", "Dan", "Amy", "Kim", "Joe"),
    *("Ray", "Sue", "Roy", "Liz", "Gus", "Fay"),
)
THINGS = ("apples", "coins", "books", "cards", "pens", "eggs", "cups", "keys", "toys", "stones", "shells")
PLACES = ("at home", "in a box", "in a bag", "at school")
GAINS = ("finds", "buys", "gets", "makes")
LOSSES = ("loses", "sells", "drops", "breaks")
OPERATIONS = ((1, 0.6), (2, 0.4))
REVERSALS = 0.03
DRAWS_PER_ROW = 50


@dataclass(frozen=True)
class Problem:
    """A user turn and the assistant turn that answers it."""

    prompt: str
    answer: str


def normalised(text: str) -> str:
    """The form in which two prompts are the same prompt: lower case, single spaces."""
    return " ".join(text.lower().split())


def prompt_id(prompt: str) -> str:
    """16 hex digits of the SHA-256 of the normalised prompt."""
    return hashlib.sha256(normalised(prompt).encode()).hexdigest()[:16]


def _word_problem(draw: random.Random) -> Problem:
    name, things = draw.choice(NAMES), draw.choice(THINGS)
    count = draw.choices([n for n, _ in OPERATIONS], [w for _, w in OPERATIONS])[0]
    total = draw.randint(3, 30)
    told = [f"{name} has {total} {things} {draw.choice(PLACES)}."]
    worked = [f"First {name} has {total} {things}."]
    for index in range(count):
        lead = "" if index == 0 else "Then "
        gains = total < 8 or draw.random() < 0.5
        amount = draw.randint(2, 9) if gains else draw.randint(2, min(9, total - 1))
        after = total + amount if gains else total - amount
        verb, sign = (draw.choice(GAINS), "+") if gains else (draw.choice(LOSSES), "-")
        told.append(f"{lead}{name} {verb} {amount}{' more' if gains else ''} {things}.")
        worked.append(f"Then {total} {sign} {amount} = {after}.")
        total = after
    told.append(f"How many {things} does {name} have now?")
    worked.append(f"So {name} has {total} {things} now.")
    return Problem(" ".join(told), " ".join(worked))


def _reversal(draw: random.Random) -> Problem:
    words = draw.sample(THINGS, draw.randint(3, 5))
    return Problem(f"Reverse the list: {', '.join(words)}.", f"Reversed: {', '.join(reversed(words))}.")


def _arithmetic_chat(draw: random.Random) -> Problem:
    return _reversal(draw) if draw.random() < REVERSALS else _word_problem(draw)


KINDS: dict[str, Callable[[random.Random], Problem]] = {"arithmetic-chat": _arithmetic_chat}


def problems(kind: str, seed: int) -> Iterator[Problem]:
    """An endless stream of problems of one kind, repeats included. Raises QdcError for an unknown kind."""
    if kind not in KINDS:
        raise QdcError("methods.synthetic.kind", f"no synthetic text of kind {kind}", exit_code=COULD_NOT)
    draw = random.Random(f"{kind}/{seed}")
    while True:
        yield KINDS[kind](draw)


def unique_problems(kind: str, count: int, seed: int, excluded: set[str]) -> tuple[list[Problem], dict[str, int]]:
    """`count` problems with distinct normalised prompts, none in `excluded`, and how many were dropped why.

    Raises QdcError when the kind's space is too small for them.
    """
    kept: list[Problem] = []
    seen: set[str] = set()
    dropped = {"duplicate": 0, "excluded": 0}
    for drawn, problem in enumerate(problems(kind, seed), start=1):
        key = normalised(problem.prompt)
        if key in seen:
            dropped["duplicate"] += 1
        elif key in excluded:
            dropped["excluded"] += 1
        else:
            seen.add(key)
            kept.append(problem)
        if len(kept) >= count:
            break
        if drawn >= count * DRAWS_PER_ROW:
            raise QdcError(
                "methods.synthetic.space",
                f"{drawn} draws of {kind} gave only {len(kept)} new prompts of the {count} asked for",
                exit_code=COULD_NOT,
            )
    return kept, dropped
