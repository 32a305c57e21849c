"""How rules list what they found.

Owns shortening. Leaves the sentences to the rules.
"""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 3


def few(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - SHOWN
    shown = ", ".join(names[:SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


def gib(size: float) -> str:
    """Bytes as GiB, to a tenth."""
    return f"{size / 1024**3:.1f} GiB"
