"""When a drafting variant is closed because it has too much to do, and when open again.

Owns the hysteresis. State, but no clock: the time is passed in.
"""

from __future__ import annotations

from serving.router.settings import Routing


class Gates:
    """One gate per drafting variant; a gate that was never closed is open."""

    def __init__(self) -> None:
        self._busy_at: dict[tuple[str, str], float] = {}
        """Of closed gates: when their level was last too high to open."""

    def is_open(
        self, gate: tuple[str, str], level: float, most: float, routing: Routing, now: float
    ) -> bool:
        """Whether one more request may come, at `level` running requests per replica.

        Closes at `most`, at once. Opens again where the level has been at `return_at` of it or
        below for `dwell_s` seconds: answers of one length end together, and the level dips.
        """
        closed = gate in self._busy_at
        if level >= most or (closed and level > routing.return_at * most):
            self._busy_at[gate] = now
            return False
        if closed and now - self._busy_at[gate] < routing.dwell_s:
            return False
        self._busy_at.pop(gate, None)
        return True
