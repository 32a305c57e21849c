"""From the rounds' counts to figures: throughput of each arm at each step, and the verdict.

Owns which values are compared and the goal. Leaves intervals to `statistics`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from serving.studies.analysis.answer import streams_in_words
from serving.studies.routing.ramp import StepCount
from serving.studies.statistics import Estimate, ratio_of_medians

DRAFTING, PLAIN, ROUTED = "static mtp", "static plain", "load-aware"
ARMS = (DRAFTING, PLAIN, ROUTED)
# The goal: at most so much below the better variant, where the two differ by so much somewhere.
LEAST_SHARE = 0.95
LEAST_DIFFERENCE = 0.15

Rounds = Mapping[str, Sequence[Sequence[StepCount]]]
"""By arm: for each round, the steps of its ramp. The rounds of all arms belong together."""
Verdict = Literal["held", "held by the median", "missed by the median", "missed"]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One step over all rounds."""

    step: int
    """From 1."""
    streams: int
    throughput: dict[str, Estimate]
    """Tokens/s by arm: the median over the rounds."""
    better: str
    """The static arm with the higher median."""
    ratio: Estimate
    """load-aware over the better static arm, medians over rounds."""
    difference: Estimate
    """static plain over static mtp."""
    drafting_share: float
    """Of load-aware's tokens, those of the drafting variant."""

    @property
    def verdict(self) -> Verdict:
        """Whether load-aware kept within 5 %: with its whole interval, or by its median."""
        low, high = self.ratio.low, self.ratio.high
        if self.held:
            return "held" if low is None or low >= LEAST_SHARE else "held by the median"
        return "missed" if high is None or high < LEAST_SHARE else "missed by the median"

    @property
    def held(self) -> bool:
        """Whether the median kept within 5 %."""
        return self.ratio.value >= LEAST_SHARE

    @property
    def differs(self) -> float:
        """By which share the better static arm is above the other."""
        value = self.difference.value
        return max(value, 1 / value) - 1


class NothingMeasuredError(ValueError):
    """An arm has no token in some step of every round, so there is nothing to compare."""


def figures_of(rounds: Rounds, drafting_variant: str) -> tuple[StepFigures, ...]:
    """Every step's figures; raises NothingMeasuredError.

    Intervals are bootstrap ones that draw whole rounds: within a round, what the machine did
    meanwhile is common to its seconds.
    """
    steps = len(rounds[ROUTED][0])
    return tuple(_step(rounds, number, drafting_variant) for number in range(steps))


def _step(rounds: Rounds, number: int, drafting_variant: str) -> StepFigures:
    counts = {arm: [ramp[number] for ramp in rounds[arm]] for arm in ARMS}
    values = {arm: [each.tokens_per_s for each in counts[arm]] for arm in ARMS}
    for arm in ARMS:
        if min(values[arm]) <= 0:
            streams = counts[arm][0].streams
            raise NothingMeasuredError(
                f"{arm} brought no token in step {number + 1} ({streams} streams) of some round; "
                "look at the failures and the stack's log, or make the steps longer"
            )
    throughput = {arm: median(values[arm]) for arm in ARMS}
    better = max((DRAFTING, PLAIN), key=lambda arm: throughput[arm].value)
    drafted = sum(each.tokens.get(drafting_variant, 0.0) for each in counts[ROUTED])
    return StepFigures(
        step=number + 1,
        streams=counts[ROUTED][0].streams,
        throughput=throughput,
        better=better,
        ratio=_ratio(values[ROUTED], values[better]),
        difference=_ratio(values[PLAIN], values[DRAFTING]),
        drafting_share=drafted / sum(sum(each.tokens.values()) for each in counts[ROUTED]),
    )


def median(values: Sequence[float]) -> Estimate:
    """The median over rounds with its bootstrap interval: that of a ratio to ones."""
    return _ratio(values, [1.0] * len(values))


def _ratio(over: Sequence[float], under: Sequence[float]) -> Estimate:
    return ratio_of_medians(over, under, range(len(over)))


def headline(steps: Sequence[StepFigures]) -> str:
    """The answer in a sentence."""
    held = sum(each.held for each in steps)
    widest = max(steps, key=lambda each: each.differs)
    text = (
        f"load-aware is within {1 - LEAST_SHARE:.0%} of the better variant's throughput, or above "
        f"it, at {held} of {len(steps)} steps; the two differ by up to {widest.differs:.0%} "
        f"({streams_in_words(widest.streams)})"
    )
    if widest.differs < LEAST_DIFFERENCE:
        text += f", which is less than {LEAST_DIFFERENCE:.0%}, so this ramp says little"
    return text


def reached(steps: Sequence[StepFigures]) -> bool:
    """The goal: no step missed, in a range where the two variants differ enough somewhere."""
    differs = any(each.differs >= LEAST_DIFFERENCE for each in steps)
    return differs and all(each.held for each in steps)
