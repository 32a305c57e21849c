"""Which fault comes when: all of it follows from a seed.

Owns the kinds of fault and their order. Leaves doing them to `faults`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

# Long enough for the load to be on every replica again, seconds.
PAUSE_S = (3.0, 8.0)


class FaultKind(StrEnum):
    """What is done to the stack."""

    CORE_KILLED = "engine core killed"
    REPLICA_KILLED = "engine replica killed"
    CORE_HUNG = "engine core hung"
    """Stopped by SIGSTOP until the stack has given it up."""
    CORE_SLOW = "engine core slow"
    """Stopped by SIGSTOP for less than the health check takes."""
    GATEWAY_KILLED = "gateway killed"
    PROXY_KILLED = "HAProxy killed"
    CONTROLLER_KILLED = "Serve's controller killed"


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault that is to come."""

    kind: FaultKind
    pause_s: float
    """Load without a fault before it, from the recovery of the one before."""
    draw: float
    """In [0, 1): which of the processes in question it is."""

    def choose(self, count: int) -> int:
        """The place of the victim among `count`; raises ValueError for none."""
        if count < 1:
            raise ValueError(f"nothing there for: {self.kind}")
        return int(self.draw * count)


def schedule(seed: int) -> Iterator[Planned]:
    """Faults without end: every kind once in a drawn order, then again in another.

    The same for the same seed.
    """
    drawn = random.Random(seed)
    while True:
        kinds = list(FaultKind)
        drawn.shuffle(kinds)
        for kind in kinds:
            yield Planned(kind, round(drawn.uniform(*PAUSE_S), 2), drawn.random())
