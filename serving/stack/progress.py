"""Showing how a stack comes up: one line per component, with its step and its time.

Owns the picture. On a terminal the lines stand still and their clocks run;
elsewhere each change is a line of its own, so that a log reads well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from serving.stack.events import DRAINING, ENDED, FAILED, IDLE, READY, UNFIT, WAITING, Step

STYLES = {
    READY: "green",
    FAILED: "red",
    UNFIT: "red",
    WAITING: "yellow",
    ENDED: "dim",
    IDLE: "dim",
    DRAINING: "cyan",
}
MARKS = {READY: "✓", FAILED: "✗", UNFIT: "✗"}
_STILL = (READY, FAILED, UNFIT, ENDED, IDLE)


@dataclass(slots=True)
class _Row:
    step: str
    detail: str
    began: float
    ended: float | None = None


class Progress:
    """The components' steps; use as a context manager around the work."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._rows: dict[str, _Row] = {}
        self._spinner = Spinner("dots")
        self._live = Live(
            get_renderable=self._table, console=console, refresh_per_second=8, transient=False
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def show(self, event: Step) -> None:
        """Take a component's new step."""
        now = self._clock()
        row = self._rows.setdefault(event.name, _Row("", "", began=now))
        changed = row.step != event.step
        row.step, row.detail = event.step, event.detail
        row.ended = now if event.step in _STILL else None
        if changed and not self._console.is_terminal:
            seconds = now - row.began
            detail = f" ({event.detail})" if event.detail else ""
            after = f" after {seconds:.0f} s" if seconds >= 1 else ""
            self._console.print(f"{event.name}: {event.step}{detail}{after}", soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        now = self._clock()
        for name, row in self._rows.items():
            still = row.step in _STILL
            mark = Text(MARKS.get(row.step, "·"), STYLES.get(row.step, ""))
            table.add_row(
                mark if still else self._spinner,
                name,
                Text(row.step, STYLES.get(row.step, "")),
                f"{(row.ended or now) - row.began:4.0f} s",
                Text(row.detail, "dim"),
            )
        return table
