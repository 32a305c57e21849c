"""What a run says: the goals, the faults, the failures by cause; for a terminal and as JSON.

Owns the figures that are counted out of requests and faults, and their words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from serving.studies.chaos.faults import Fault
from serving.studies.chaos.load import Request
from serving.studies.chaos.run import Outcome
from serving.studies.chaos.verdict import during, unavoidable

NO_FAULT = "no fault before it"


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed, and what with."""

    request: Request
    lost_with: Fault | None
    """The fault that it was lost with; None for a finding."""
    during: Fault | None
    """The last fault before it failed."""


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal: its value and whether it is reached."""

    name: str
    value: str
    reached: bool


def failures(outcome: Outcome) -> list[Failure]:
    """Every request that failed, in the order they ended."""
    faults = [each.fault for each in outcome.suffered]
    failed = [each for each in outcome.requests if each.outcome == "failed"]
    return [
        Failure(request, unavoidable(request, faults), during(request, faults))
        for request in sorted(failed, key=lambda each: each.ended_at)
    ]


def findings(outcome: Outcome) -> list[Failure]:
    """The failures that need not have been."""
    return [each for each in failures(outcome) if each.lost_with is None]


def longest_stall_s(outcome: Outcome) -> float:
    """Between two events of a stream that succeeded, seconds; 0 where there was none."""
    return max(
        (
            each.longest_stall_s
            for each in outcome.requests
            if each.streamed and each.outcome == "answered"
        ),
        default=0.0,
    )


def goals(outcome: Outcome) -> list[Goal]:
    """What a run is judged by."""
    found, foreign = len(findings(outcome)), sum(each.foreign for each in outcome.requests)
    slots = outcome.leases + outcome.in_engines
    return [
        Goal("failures that need not have been", str(found), not found),
        Goal("slots leaked", f"{slots:g}", not slots),
        Goal("duplicates", f"{outcome.duplicates:g}", not outcome.duplicates),
        Goal("answers to another request", str(foreign), not foreign),
        Goal("whole again after each fault", outcome.unrecovered or "yes", not outcome.unrecovered),
    ]


def reached(outcome: Outcome) -> bool:
    """Whether every goal is."""
    return all(goal.reached for goal in goals(outcome))


def by_cause(outcome: Outcome) -> dict[str, Counter[str]]:
    """Failures counted by cause: `unavoidable`, or the fault that a finding came after."""
    found: dict[str, Counter[str]] = {}
    for each in failures(outcome):
        if each.lost_with is not None:
            why = f"lost with: {each.lost_with.kind}"
        else:
            why = f"after: {each.during.kind if each.during else NO_FAULT}"
        found.setdefault(each.request.cause, Counter())[why] += 1
    return found


def rendered(outcome: Outcome) -> RenderableType:
    """All of it for a terminal."""
    return Group(
        *_lines(outcome), _faults_table(outcome), _causes_table(outcome), _goals_table(outcome)
    )


def _lines(outcome: Outcome) -> Iterator[str]:
    counts = Counter(each.outcome for each in outcome.requests)
    lost = len(failures(outcome)) - len(findings(outcome))
    yield (
        f"seed {outcome.plan.seed}, {outcome.plan.clients} clients, "
        f"{outcome.ended - outcome.began:.0f} s: {len(outcome.requests)} requests, "
        f"{counts['answered']} answered, {counts['left']} left by their clients, "
        f"{counts['failed']} failed ({lost} could not but fail)"
    )
    yield (
        f"retries by the gateways: {outcome.retries:g}; longest stall of a stream that "
        f"succeeded: {longest_stall_s(outcome):.1f} s; engines finished "
        f"{outcome.engine_answers:g} requests, clients got {outcome.client_answers} of them whole "
        f"(and {outcome.unclear} had left or failed)"
    )
    yield from (f"left out: {each}" for each in outcome.skipped)


def _faults_table(outcome: Outcome) -> Table:
    table = Table("at", "fault", "victim", "whole after", "lost with it", "findings after it")
    all_failures = failures(outcome)
    for each in outcome.suffered:
        took = each.whole_after_s
        table.add_row(
            f"{each.fault.began - outcome.began:.0f} s",
            str(each.fault.kind),
            each.fault.victim,
            "not in time" if took is None else f"{took:.0f} s",
            str(sum(failure.lost_with is each.fault for failure in all_failures)),
            str(
                sum(
                    failure.lost_with is None and failure.during is each.fault
                    for failure in all_failures
                )
            ),
        )
    return table


def _causes_table(outcome: Outcome) -> Table:
    table = Table("failure", "count", "of these")
    for cause, counts in sorted(by_cause(outcome).items()):
        told = ", ".join(f"{count} {why}" for why, count in counts.most_common())
        table.add_row(cause, str(counts.total()), told)
    return table


def _goals_table(outcome: Outcome) -> Table:
    table = Table("goal", "", "reached")
    for goal in goals(outcome):
        table.add_row(goal.name, goal.value, "yes" if goal.reached else "no")
    return table


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The run; of the requests, those that failed."""
    counts = Counter(each.outcome for each in outcome.requests)
    return {
        "plan": asdict(outcome.plan),
        "began": outcome.began,
        "seconds": outcome.ended - outcome.began,
        "requests": {"all": len(outcome.requests), **counts},
        "retries": outcome.retries,
        "longest_stall_s": longest_stall_s(outcome),
        "leases_left": outcome.leases,
        "requests_left_in_engines": outcome.in_engines,
        "engine_answers": outcome.engine_answers,
        "client_answers": outcome.client_answers,
        "unclear": outcome.unclear,
        "unrecovered": outcome.unrecovered,
        "goals": [asdict(goal) for goal in goals(outcome)],
        "reached": reached(outcome),
        "faults": [
            {**_told(each.fault, outcome), "whole_after_s": each.whole_after_s}
            for each in outcome.suffered
        ],
        "skipped": outcome.skipped,
        "failures": [
            {
                **asdict(each.request),
                "lost_with": each.lost_with and str(each.lost_with.kind),
                "during": each.during and str(each.during.kind),
            }
            for each in failures(outcome)
        ],
    }


def _told(fault: Fault, outcome: Outcome) -> dict[str, Any]:
    return {
        "kind": str(fault.kind),
        "victim": fault.victim,
        "replica": fault.replica,
        "at_s": fault.began - outcome.began,
        "took_s": fault.done - fault.began,
    }
