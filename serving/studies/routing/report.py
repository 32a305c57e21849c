"""What a comparison says: a table on the terminal, JSON, and a page in Markdown with charts.

Owns the words and which charts there are. Leaves figures to `figures`, and looks to `report`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table as Printed

from serving.stack import history
from serving.studies.report.content import Column, Page, Remark, Table, interval
from serving.studies.report.markdown import to_markdown
from serving.studies.report.plots import Chart, Line, Point, draw
from serving.studies.routing.figures import (
    ARMS,
    DRAFTING,
    LEAST_SHARE,
    PLAIN,
    ROUTED,
    Rounds,
    StepFigures,
    headline,
    reached,
)
from serving.studies.routing.ramp import Shape
from serving.studies.routing.run import Contest
from serving.studies.statistics import Estimate

COLUMNS = ("step", "streams", *ARMS, "better", "load-aware / better", "drafting's share", "verdict")
# In every chart the same: plain in the colour of text.
STYLES = {PLAIN: 0, DRAFTING: 1, ROUTED: 2}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A comparison that was carried out."""

    contest: Contest
    shape: Shape
    rounds: Rounds
    steps: tuple[StepFigures, ...]
    max_tokens: int
    prompts: str
    """The set that was asked."""
    began: str
    """Date."""
    machine: Mapping[str, str]
    commit: str | None
    command: str


def as_table(outcome: Outcome) -> Printed:
    """The steps for a terminal."""
    table = Printed(*COLUMNS, title=settings_in_words(outcome.contest))
    for row in _rows(outcome.steps):
        table.add_row(*row)
    return table


def settings_in_words(contest: Contest) -> str:
    """What the router was told: the gate's figures, and what else the stack file sets."""
    routing = contest.routing
    told = {
        "crossover_streams": f"{{{contest.drafting}: {contest.crossover}}}",
        "return_at": f"{routing.return_at:g}",
        "dwell_s": f"{routing.dwell_s:g}",
    }
    given = routing.model_dump(mode="json", exclude_unset=True, exclude={"policy"})
    return ", ".join(f"{name} {value}" for name, value in (given | told).items())


def write_report(outcome: Outcome, folder: Path) -> list[Path]:
    """Write `routing.json`, `report.md` and `figures/*.svg`; returns the files."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    written = {folder / "routing.json": json.dumps(as_json(outcome), indent=1) + "\n"}
    page = page_of(outcome)
    written[folder / "report.md"] = to_markdown(page, "figures")
    for drawing in page.drawings:
        written[folder / "figures" / f"{drawing.chart.name}.svg"] = drawing.standalone
    for file, text in written.items():
        file.write_text(text, encoding="utf-8")
    return list(written)


def as_json(outcome: Outcome) -> dict[str, Any]:
    """All that was counted, and what follows from it."""
    contest = outcome.contest
    return {
        "began": outcome.began,
        "command": outcome.command,
        "commit": outcome.commit,
        "machine": dict(outcome.machine),
        "model": contest.model,
        "crossover_streams": {contest.drafting: contest.crossover},
        "return_at": contest.routing.return_at,
        "dwell_s": contest.routing.dwell_s,
        "stack": json.loads(history.to_json(contest.stack)),
        "prompts": outcome.prompts,
        "max_tokens": outcome.max_tokens,
        "shape": asdict(outcome.shape),
        "reached": reached(outcome.steps),
        "steps": [{**asdict(each), "verdict": each.verdict} for each in outcome.steps],
        "rounds": {arm: [[asdict(s) for s in r] for r in outcome.rounds[arm]] for arm in ARMS},
    }


def page_of(outcome: Outcome) -> Page:
    """The report, before it is Markdown."""
    contest, shape = outcome.contest, outcome.shape
    rounds = len(outcome.rounds[ROUTED])
    return Page(
        over=f"{contest.model} on {outcome.machine.get('cpu', 'this machine')} · {outcome.began}",
        title="Load-aware routing over a ramp of concurrency",
        question="Does the router keep up with the better variant, whatever the load?",
        answer=f"{headline(outcome.steps)}.",
        flags=tuple(_flags(outcome)),
        facts=f"{settings_in_words(contest)} · {rounds} interleaved rounds · {len(shape.streams)} "
        f"steps of {shape.step_s:g} s, of which the last {shape.window_s:g} s count",
        drawings=tuple(draw(chart) for chart in _charts(outcome)),
        tables=(_table(outcome.steps),),
        method=(
            Remark("Load", _load_in_words(outcome)),
            Remark(
                "Order",
                "A round is one whole ramp of every arm on the same running stack; who begins "
                "changes from round to round. The static arms name their variant, the third "
                "leaves it to the router.",
            ),
            Remark(
                "Throughput",
                "Output tokens by the time they came, spread evenly over the events of an answer, "
                "per second of the step's window.",
            ),
            Remark(
                "Intervals",
                "95 %, percentile bootstrap of medians, drawing whole rounds. With five rounds "
                "they reach about from the lowest to the highest.",
            ),
            Remark(
                "Verdict",
                f"At {LEAST_SHARE:.2f} or above it is held, below missed; without the addition “by "
                "the median” the whole interval is on that side. The better variant is chosen by "
                "the same medians, which counts against load-aware where the two are alike.",
            ),
        ),
        commands=outcome.command,
        background=(_machine(outcome),),
        files=(("The stack, as JSON", json.dumps(as_json(outcome)["stack"], indent=1)),),
    )


def _load_in_words(outcome: Outcome) -> str:
    return (
        "Closed loop: each stream sends its next request when its last has ended, and goes on "
        f"from step to step. Prompts of {outcome.prompts}, each with new text before it, the same "
        f"for every arm of a round; {outcome.max_tokens} tokens each, greedy."
    )


def _flags(outcome: Outcome) -> list[Remark]:
    failed = {
        arm: sum(step.failures for ramp in outcome.rounds[arm] for step in ramp) for arm in ARMS
    }
    told = ", ".join(f"{count} of {arm}" for arm, count in failed.items() if count)
    return [Remark("errors", f"requests failed: {told}")] if told else []


def _table(steps: Sequence[StepFigures]) -> Table:
    words = {"better", "verdict"}
    return Table(
        "Throughput by step, tokens/s",
        tuple(Column(label, number=label not in words) for label in COLUMNS),
        tuple(_rows(steps)),
        "Medians over rounds, in brackets the 95 % interval. Drafting's share is of load-aware's "
        "tokens.",
    )


def _rows(steps: Sequence[StepFigures]) -> list[tuple[str, ...]]:
    return [
        (
            str(each.step),
            str(each.streams),
            *(interval(each.throughput[arm], 0) for arm in ARMS),
            each.better,
            interval(each.ratio),
            f"{each.drafting_share:.0%}",
            each.verdict,
        )
        for each in steps
    ]


def _machine(outcome: Outcome) -> Table:
    facts = {**outcome.machine, "commit": outcome.commit or "not known"}
    columns = (Column("fact", number=False), Column("value", number=False))
    return Table("Environment", columns, tuple(facts.items()))


# Charts


def halves(steps: Sequence[StepFigures]) -> dict[str, tuple[StepFigures, ...]]:
    """The way up to the most streams and the way down from there; the top is in both."""
    top = max(range(len(steps)), key=lambda place: steps[place].streams)
    ways = {"up": tuple(steps[: top + 1]), "down": tuple(reversed(steps[top:]))}
    return {way: part for way, part in ways.items() if len(part) > 1}


def _charts(outcome: Outcome) -> list[Chart]:
    ways = halves(outcome.steps)
    charts = [
        _chart(
            f"throughput-{way}",
            f"Throughput on the way {way}",
            "Output tokens of all streams per second. Bars are 95 % intervals.",
            "tokens/s",
            [
                Line(arm, _points([(each, each.throughput[arm]) for each in part]), STYLES[arm])
                for arm in ARMS
            ],
        )
        for way, part in ways.items()
    ]
    ratio = _chart(
        "ratio",
        "load-aware over the better variant",
        f"The rule is at {LEAST_SHARE:.2f}, the goal. Bars are 95 % intervals.",
        "ratio of throughputs",
        [
            Line(f"on the way {way}", _points([(each, each.ratio) for each in part]), style)
            for style, (way, part) in enumerate(ways.items(), 1)
        ],
        reference=LEAST_SHARE,
        from_zero=False,
    )
    return [*charts, ratio]


def _chart(
    name: str, title: str, caption: str, y_label: str, lines: Sequence[Line], **options: Any
) -> Chart:
    told = "; ".join(
        f"{line.label} {line.points[0].y:.4g} at {line.points[0].x:g} to "
        f"{line.points[-1].y:.4g} at {line.points[-1].x:g}"
        for line in lines
    )
    return Chart(
        name=name,
        title=title,
        caption=caption,
        alt=f"{title}: {y_label} over streams. {told}.",
        x_label="streams",
        y_label=y_label,
        lines=tuple(lines),
        doubling_x=True,
        **options,
    )


def _points(found: Sequence[tuple[StepFigures, Estimate]]) -> tuple[Point, ...]:
    return tuple(
        Point(step.streams, at.value, at.low, at.high)
        for step, at in sorted(found, key=lambda each: each[0].streams)
    )
