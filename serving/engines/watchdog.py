"""Notices that an engine's drafting has collapsed while it runs.

Owns the windows and the verdict. Leaves reading the counters to `drafting`, and what follows
(a metric, a log line, no more leases) to the replica.
"""

from __future__ import annotations

from serving.engines.drafting import Drafting

# Fewer drafts say little: at 0.5 accepted, the rate of 200 is 0.07 wide (95 %, Wilson).
WINDOW_DRAFTS = 200
# Text of another kind halves acceptance for a while; a broken head stays.
WINDOWS_IN_A_ROW = 3
COLLAPSED_TO = 0.5


class AcceptanceWatch:
    """Looks at windows of at least `WINDOW_DRAFTS` drafts; the first is what others fall from."""

    def __init__(self, began: Drafting) -> None:
        self._window_began = began
        self._first: float | None = None
        self._suspect = 0
        self.window: Drafting | None = None
        """The last whole window; None before the first."""

    def look(self, now: Drafting) -> str | None:
        """Why drafting counts as collapsed, in a sentence; None where it does not.

        The last verdict stands until the next window is whole.
        """
        window = now.since(self._window_began)
        if window.drafts >= WINDOW_DRAFTS:
            self._window_began, self.window = now, window
            self._suspect = self._suspect + 1 if self._fault(window) else 0
            if self._first is None and not self._suspect:
                self._first = window.acceptance
        if self.window is None or self._suspect < WINDOWS_IN_A_ROW:
            return None
        return self._fault(self.window)

    def _fault(self, window: Drafting) -> str | None:
        if not window.accepted:
            return f"no draft token is accepted: {window}"
        if window.flat_near_one:
            return f"almost every draft token is accepted, as in a text that loops: {window}"
        if self._first is not None and window.acceptance < COLLAPSED_TO * self._first:
            return f"acceptance fell from {self._first:.3f} to {window}"
        return None
