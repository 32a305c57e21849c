"""Circuit breakers: replicas that answer nobody are left alone for a while.

Owns what counts as a replica's fault, how long it gets no lease, and the trial that ends it.
Leaves noticing faults to `dispatch` and keeping leases away to `request_routers`. Each gateway
process has its own, `breakers`, for use on its event loop only.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

logger = logging.getLogger("ray.serve")

State = Literal["closed", "open", "half-open"]

# Time-outs in a row; of what only a dead engine does, one is enough.
SILENCES_TO_OPEN = 3
FIRST_OPEN_S = 5.0
# Each trial that fails doubles the time, up to this.
LONGEST_OPEN_S = 60.0
# A replica that was not heard of for so long is gone, or as good as new.
FORGOTTEN_AFTER_S = 600.0


@dataclass(slots=True)
class _Breaker:
    """What is known of one replica; times as the clock of `Breakers` has them."""

    used: float
    heard: float = -math.inf
    """When the last part of any reply came."""
    silences: int = 0
    """In a row, while closed."""
    opened: float = -math.inf
    open_for_s: float = 0.0
    """0 while closed."""
    trial: str = ""
    """The lease that tries a half-open replica; empty where none does."""


class Breakers:
    """The breakers of one gateway process, by replica; `now` is in seconds and never goes back.

    A breaker opens at the first fault, or after `SILENCES_TO_OPEN` requests in a row that got
    nothing, for `FIRST_OPEN_S`. It is then half-open: one lease at a time tries the replica. A
    reply closes it, and a trial that fails opens it for twice as long.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._breakers: dict[str, _Breaker] = {}

    # --- for who leases -------------------------------------------------------------------

    def state(self, replica: str) -> State:
        """Where the replica's breaker stands; one never heard of is closed."""
        breaker = self._known(replica)
        return "closed" if breaker is None else self._state(breaker)

    def allows(self, replica: str) -> bool:
        """Whether a lease may go to the replica: it is closed, or half-open without a trial.

        A trial that has not failed for as long as the breaker was open bars nobody any more: a
        long answer that comes as a whole is heard of only at its end.
        """
        breaker = self._known(replica)
        if breaker is None:
            return True
        state = self._state(breaker)
        late = self._now() - breaker.used >= breaker.open_for_s
        return state == "closed" or (state == "half-open" and (not breaker.trial or late))

    def take(self, replica: str, lease: str) -> bool:
        """As `allows`; where the replica is half-open, `lease` is then its trial."""
        if not self.allows(replica):
            return False
        breaker = self._known(replica)
        if breaker is not None and breaker.open_for_s:
            breaker.trial, breaker.used = lease, self._now()
        return True

    def ended(self, replica: str, lease: str) -> None:
        """The lease is over; where it was a trial that showed nothing, another may follow."""
        breaker = self._known(replica)
        if breaker is not None and breaker.trial == lease:
            breaker.trial = ""

    # --- for who sends requests -----------------------------------------------------------

    def replied(self, replica: str) -> None:
        """Something of a reply came that does not say that the engine is dead: all is well."""
        breaker = self._breakers.get(replica) or self._new(replica)
        breaker.heard = breaker.used = self._now()
        if breaker.open_for_s:
            logger.info("replica %s answers again", replica)
            breaker.open_for_s, breaker.trial = 0.0, ""
        breaker.silences = 0

    def fault(self, replica: str) -> None:
        """A request met what only a sick replica does: no connection, or a dead engine.

        Not for refusals, bad requests, clients that left or waits for a slot.
        """
        self._failed(replica, SILENCES_TO_OPEN)

    def silent(self, replica: str, since: float) -> None:
        """A request sent at `since`, by the clock `now`, got no byte within its time limit.

        Counts only where no other request got one meanwhile: a busy replica answers somebody.
        """
        breaker = self._known(replica)
        if breaker is None or since > max(breaker.heard, breaker.opened):
            self._failed(replica, 1)

    def _failed(self, replica: str, silences: int) -> None:
        breaker = self._known(replica) or self._new(replica)
        breaker.used = self._now()
        state = self._state(breaker)
        if state == "closed":
            breaker.silences += silences
            if breaker.silences >= SILENCES_TO_OPEN:
                self._open(replica, breaker, FIRST_OPEN_S)
        elif state == "half-open" and breaker.trial:
            self._open(replica, breaker, min(2 * breaker.open_for_s, LONGEST_OPEN_S))
        # Any other request was sent before the breaker opened, and says nothing new.

    def _state(self, breaker: _Breaker) -> State:
        if not breaker.open_for_s:
            return "closed"
        return "open" if self._now() < breaker.opened + breaker.open_for_s else "half-open"

    def _open(self, replica: str, breaker: _Breaker, for_s: float) -> None:
        logger.warning("replica %s does not answer; no requests to it for %g s", replica, for_s)
        breaker.opened, breaker.open_for_s = self._now(), for_s
        breaker.silences, breaker.trial = 0, ""

    def _known(self, replica: str) -> _Breaker | None:
        breaker = self._breakers.get(replica)
        return breaker if breaker is not None and self._is_kept(breaker) else None

    def _new(self, replica: str) -> _Breaker:
        self._breakers = {
            name: breaker for name, breaker in self._breakers.items() if self._is_kept(breaker)
        }
        return self._breakers.setdefault(replica, _Breaker(used=self._now()))

    def _is_kept(self, breaker: _Breaker) -> bool:
        return self._now() - breaker.used < FORGOTTEN_AFTER_S


breakers = Breakers()
"""Of this process; leases and requests must meet in the same ones."""
