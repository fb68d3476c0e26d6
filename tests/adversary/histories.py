"""Histories: lists of steps, told in words where one of them goes wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence

from adversary.edits import EDITS, Step
from adversary.trial import OTHER, Count, Trial, Wrong
from adversary.troubles import TROUBLES

STEPS: dict[str, Step] = {**EDITS, **TROUBLES}
Taken = tuple[str, int, int]
"""A step by name, with the two numbers that it chooses by."""
CHOICES = 12


def tell(history: Sequence[Taken], count: Count | None = None) -> list[str]:
    """Live through a history in a world of its own; returns what happened, a line a step.

    Raises `Wrong` at the first wrong decision, with all that happened until then.
    """
    trial = Trial(count)
    lines = ["a first build"]
    step = ""
    try:
        for name, a, b in history:
            step = f"{name} ({a}, {b})"
            trial.clock.advance()
            lines.append(STEPS[name](trial, a, b))
            trial.count.steps[name] += 1
    except Exception as error:
        kind = error.kind if isinstance(error, Wrong) else OTHER
        trial.count.wrong[kind] += 1
        told = "".join(f"\n  {number}. {line}" for number, line in enumerate(lines))
        raise Wrong(kind, f"{error}{told}\n  {len(lines)}. {step}: here") from error
    finally:
        trial.close()
    trial.count.histories += 1
    return lines


def at_random(seed: int, length: int = 6, without: Sequence[str] = ()) -> list[Taken]:
    """A history by a seed."""
    dice = random.Random(seed)
    names = [name for name in STEPS if name not in without]
    return [(dice.choice(names), dice.randrange(CHOICES), dice.randrange(CHOICES)) for _ in range(length)]
