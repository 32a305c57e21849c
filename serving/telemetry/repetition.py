"""How much of a text repeats itself: in a loop every draft is accepted, and says nothing."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def distinct_4grams(items: Sequence[Hashable]) -> float | None:
    """Different 4-grams / all 4-grams of `items`, tokens or words; None for fewer than 4.

    Low where a text repeats itself. Called distinct-n by Li et al. 2016 (arXiv 1510.03055).
    """
    grams = [tuple(items[i : i + 4]) for i in range(len(items) - 3)]
    return len(set(grams)) / len(grams) if grams else None
