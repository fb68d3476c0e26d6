"""Intervals and a paired test for the figures of an evaluation. Standard library only.

Every interval is two-sided, 95 %. Nothing here knows what is measured.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

Z = 1.959963984540054


def wilson(hits: int, total: int) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927)."""
    if total < 1:
        raise ValueError("a proportion of nothing")
    share, square = hits / total, Z * Z
    centre = (share + square / (2 * total)) / (1 + square / total)
    half = Z / (1 + square / total) * math.sqrt(share * (1 - share) / total + square / (4 * total * total))
    return (centre - half if hits else 0.0), (centre + half if hits < total else 1.0)


def bootstrap_ratio(
    numerators: Sequence[float], denominators: Sequence[float], seed: int = 0, draws: int = 2000
) -> tuple[float, float]:
    """Percentile bootstrap interval of sum(numerators) / sum(denominators), resampling the pairs."""
    count = len(numerators)
    if count < 1 or count != len(denominators):
        raise ValueError("a ratio needs as many numerators as denominators, at least one")
    draw = random.Random(seed)
    found = []
    for _ in range(draws):
        rows = draw.choices(range(count), k=count)
        below = sum(denominators[i] for i in rows)
        if below:
            found.append(sum(numerators[i] for i in rows) / below)
    found.sort()
    return found[int(0.025 * len(found))], found[min(len(found) - 1, int(0.975 * len(found)))]


def sign_test(first_only: int, second_only: int) -> float:
    """Two-sided exact p that `first_only` and `second_only` discordant pairs come from a fair coin."""
    total, fewer = first_only + second_only, min(first_only, second_only)
    if total == 0:
        return 1.0
    tail = sum(math.comb(total, k) for k in range(fewer + 1))
    return min(1.0, float(2 * tail / 2**total))
