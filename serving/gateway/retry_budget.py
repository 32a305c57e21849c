"""How many requests a gateway may send a second time.

Owns the count alone. Leaves what may be sent again, and where to, to `dispatch`.
"""

from __future__ import annotations

# Extra load at most, as a share of the requests.
SHARE = 0.1
# What a gateway that has just started, or was quiet, has in hand; a burst's worth at most.
IN_HAND = 3.0
MOST_IN_HAND = 20.0


class RetryBudget:
    """A tenth of the requests may be sent again: each one earns a tenth of a retry."""

    def __init__(self) -> None:
        self._left = IN_HAND

    def earn(self) -> None:
        """One request has come."""
        self._left = min(self._left + SHARE, MOST_IN_HAND)

    def spend(self) -> bool:
        """Take one retry; False where there is none left."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
