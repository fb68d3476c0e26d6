"""Histories: lists of steps, told in words where one of them goes wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence

from adversary.edits import EDITS, Step
from adversary.persons import PERSONS
from adversary.trial import OTHER, Count, Trial, Wrong
from adversary.troubles import TROUBLES

STEPS: dict[str, Step] = {**EDITS, **TROUBLES, **PERSONS}
Taken = tuple[str, int, int]
"""A step by name, with the two numbers that it chooses by."""
CHOICES = 12


def tell(history: Sequence[Taken], count: Count | None = None, runs: list[str] | None = None) -> list[str]:
    """Live through a history in a world of its own; returns what happened, a line a step, and fills `runs` with the
    stages that ran after the first build.

    Raises `Wrong` at the first wrong decision, with all that happened until then.
    """
    trial = Trial(count)
    lines, step, first = list[str](), "a first build", 0
    try:
        trial.settle()
        lines.append(step)
        first = len(trial.engine.stages.done)
        for name, a, b in history:
            step = f"{name} ({a}, {b})"
            trial.clock.advance()
            lines.append(STEPS[name](trial, a, b))
            trial.count.steps[name] += 1
    except Exception as error:
        kind, what = (error.kind, error.what) if isinstance(error, Wrong) else (OTHER, repr(error))
        trial.count.wrong[kind] += 1
        told = "".join(f"\n  {number}. {line}" for number, line in enumerate(lines))
        raise Wrong(kind, f"{what}{told}\n  {len(lines)}. {step}: here") from error
    finally:
        trial.close()
    trial.count.histories += 1
    if runs is not None:
        runs += trial.engine.stages.done[first:]
    return lines


def at_random(seed: int, names: Sequence[str], length: int = 5) -> list[Taken]:
    """A history of such steps, by a seed."""
    dice = random.Random(seed)
    return [(dice.choice(names), dice.randrange(CHOICES), dice.randrange(CHOICES)) for _ in range(length)]
