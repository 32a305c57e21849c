"""What follows from the speed-ups: the fastest variant, and where a gain begins and ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from serving.studies.analysis.findings import Best, BreakEven, Crossover, Setting, Speedup
from serving.studies.statistics import Estimate, Verdict


def best_of(speedups: Iterable[Speedup]) -> tuple[Best, ...]:
    """The fastest variant in every setting, by decode speed."""
    groups: dict[Setting, list[tuple[str, Estimate]]] = {}
    for each in speedups:
        if each.decode:
            groups.setdefault(each.setting, []).append((each.arm, each.decode))
    found = []
    for setting, variants in groups.items():
        arm, speedup = max(variants, key=lambda each: (each[1].verdict == "faster", each[1].value))
        rivals = tuple(name for name, other in variants if name != arm and other.overlaps(speedup))
        found.append(Best(setting, arm, speedup, rivals))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Point:
    """A verdict at one value of what a study varies, and what it holds equal meanwhile."""

    arm: str
    category: str | None
    held: tuple[float, int]
    varied: int
    verdict: Verdict


_Course = Mapping[int, Verdict]


def _courses(
    points: Iterable[_Point],
) -> Iterator[tuple[str, str | None, tuple[float, int], _Course]]:
    """By arm and category the verdicts of the held values with the most others tried.

    Equally many: the lowest held values.
    """
    groups: dict[tuple[str, str | None], dict[tuple[float, int], dict[int, Verdict]]] = {}
    for each in points:
        by_held = groups.setdefault((each.arm, each.category), {})
        by_held.setdefault(each.held, {})[each.varied] = each.verdict
    for (arm, category), by_held in groups.items():
        held = min(by_held, key=lambda held: (-len(by_held[held]), held))
        yield arm, category, held, dict(sorted(by_held[held].items()))


def crossovers_of(speedups: Iterable[Speedup]) -> tuple[Crossover, ...]:
    """By arm and category, at the output length and temperature with the most levels tried.

    Where several have as many: the lowest temperature, then the longest outputs.
    """
    points = (
        _Point(
            each.arm,
            at.category,
            (at.temperature, -at.max_tokens),
            at.streams,
            each.decode.verdict,
        )
        for each in speedups
        if (at := each.setting).streams and each.decode
    )
    found = []
    for arm, category, (temperature, length), course in _courses(points):
        gone = _from_which_on(course, "no difference", "slower")
        slower = (
            level
            for level, verdict in course.items()
            if verdict == "slower" and gone is not None and level >= gone
        )
        tried, first = tuple(course), next(slower, None)
        found.append(Crossover(arm, category, -length, temperature, tried, gone, first))
    return tuple(found)


def break_evens_of(speedups: Iterable[Speedup]) -> tuple[BreakEven, ...]:
    """By arm and category, at the streams and temperature with the most lengths tried.

    Where several have as many: the lowest temperature, then the fewest streams.
    """
    points = (
        _Point(
            each.arm,
            at.category,
            (at.temperature, at.streams),
            at.max_tokens,
            each.end_to_end.verdict,
        )
        for each in speedups
        if (at := each.setting).streams
    )
    found = []
    for arm, category, (temperature, streams), course in _courses(points):
        faster = _from_which_on(course, "faster")
        slower = [
            length
            for length, verdict in course.items()
            if verdict == "slower" and (faster is None or length < faster)
        ]
        last = max(slower, default=None)
        found.append(BreakEven(arm, category, streams, temperature, tuple(course), faster, last))
    return tuple(found)


def _from_which_on(verdicts: Mapping[int, Verdict], *wanted: Verdict) -> int | None:
    """The smallest key at which, and at every larger one, the verdict is a wanted one."""
    found = None
    for key in sorted(verdicts, reverse=True):
        if verdicts[key] not in wanted:
            break
        found = key
    return found
