"""How a start is shown, on a terminal and in a log."""

from __future__ import annotations

import io

from rich.console import Console

from serving.stack.events import EVENT, Step
from serving.stack.progress import Progress


def steps(terminal: bool) -> str:
    now = 0.0
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, color_system=None)
    with Progress(console, clock=lambda: now) as progress:
        progress.show(Step(name="m@plain", step="starting process"))
        now = 3.0
        progress.show(Step(name="m@plain", step="loading"))
        progress.show(Step(name="m@plain", step="loading", detail="1 of 2 replicas"))
        now = 62.0
        progress.show(Step(name="m@plain", step="ready"))
        now = 70.0
    return out.getvalue()


def test_a_log_gets_a_line_for_each_step_and_none_for_a_detail() -> None:
    assert steps(terminal=False).splitlines() == [
        "m@plain: starting process",
        "m@plain: loading after 3 s",
        "m@plain: ready after 62 s",
    ]


def test_a_terminal_keeps_one_line_whose_clock_stops_when_ready() -> None:
    assert "✓  m@plain  ready    62 s" in steps(terminal=True).splitlines()[-2]


def test_an_event_is_one_line_of_json_that_reads_back() -> None:
    step = Step(name="m@plain", step="loading", detail="1 of 2\nreplicas")
    line = step.model_dump_json()
    assert "\n" not in line
    assert EVENT.validate_json(line) == step
