"""The statistics of a study, as pure functions over numbers.

Owns formulas and intervals. Leaves which numbers are compared to `analysis`. Acceptance is
counted as vLLM counts it (`vllm/v1/spec_decode/metrics.py`): a draft is one step that had
draft tokens, and the token that the model itself adds in that step is none of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import binomtest

CONFIDENCE = 0.95
RESAMPLES = 2000
SEED = 0

Verdict = Literal["faster", "no difference", "slower"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval; `low` and `high` are None where none can be given."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def verdict(self) -> Verdict:
        """Of a speed-up: whether its whole interval lies above 1, below 1, or neither."""
        if self.low is not None and self.low > 1:
            return "faster"
        if self.high is not None and self.high < 1:
            return "slower"
        return "no difference"

    def overlaps(self, other: Estimate) -> bool:
        """Whether the two intervals share a value; True where either has none."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return True
        return self.low <= other.high and other.low <= self.high


def ratio_of_medians(
    over: Sequence[float], under: Sequence[float], groups: Sequence[Hashable]
) -> Estimate:
    """median(over) / median(under) of paired values, with a bootstrap interval.

    `over[i]`, `under[i]` and `groups[i]` belong to one pair. The interval is the percentile
    one (Efron and Tibshirani 1993, chapter 13) of RESAMPLES seeded resamples. What is drawn
    are whole groups, here prompts: rounds of one prompt repeat much the same text, and
    drawn one by one they would pass for independent evidence and make the interval too
    narrow. Fewer than two groups give no interval. Raises ValueError for no pairs, unequal
    lengths or values that are not above 0.
    """
    if not len(over) == len(under) == len(groups) > 0:
        raise ValueError(f"{len(over)} and {len(under)} values in {len(groups)} groups do not pair")
    if min(*over, *under) <= 0:
        raise ValueError("a ratio of medians needs values above 0")
    value = float(np.median(over) / np.median(under))
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    if len(members) < 2:
        return Estimate(value)
    drawn = np.random.default_rng(SEED).integers(len(members), size=(RESAMPLES, len(members)))
    above, below = (
        _resampled_medians(each, list(members.values()), drawn) for each in (over, under)
    )
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(above / below, (tail, 1 - tail))
    return Estimate(value, float(low), float(high))


def _resampled_medians(
    values: Sequence[float], members: Sequence[Sequence[int]], drawn: np.ndarray
) -> np.ndarray:
    """The median of each row of groups in `drawn`; groups of unequal size are padded with nan."""
    table = np.full((len(members), max(map(len, members))), np.nan)
    for row, indices in enumerate(members):
        table[row, : len(indices)] = [values[index] for index in indices]
    samples = table[drawn].reshape(len(drawn), -1)
    median = np.nanmedian if np.isnan(table).any() else np.median
    return np.asarray(median(samples, axis=1))


def median_and_p95(values: Sequence[float]) -> tuple[float, float]:
    """The median and the 95th percentile, linear between ranks; raises ValueError for none."""
    if not values:
        raise ValueError("no values")
    median, p95 = np.quantile(values, (0.5, 0.95))
    return float(median), float(p95)


def proportion(successes: int, trials: int) -> Estimate:
    """successes / trials with its Wilson score interval (Wilson 1927).

    Raises ValueError unless 0 <= successes <= trials and trials > 0.
    """
    interval = binomtest(successes, trials).proportion_ci(CONFIDENCE, method="wilson")
    return Estimate(successes / trials, float(interval.low), float(interval.high))


def acceptance_rate(accepted: int, drafted: int) -> Estimate:
    """accepted / drafted tokens, as vLLM's draft acceptance rate.

    The interval takes draft tokens as independent. Those of one draft are not, since none is
    accepted after a refused one; for n > 1 it is therefore somewhat too narrow.
    """
    return proportion(accepted, drafted)


def mean_acceptance_length(accepted: int, drafts: int) -> float:
    """1 + accepted / drafts: tokens per step that drafted, the model's own included.

    Raises ValueError where there were no drafts.
    """
    if drafts < 1:
        raise ValueError("no drafts, so no mean acceptance length")
    return 1 + accepted / drafts


def per_position_rates(accepted: Sequence[int], drafts: int) -> tuple[Estimate, ...]:
    """p_i = accepted[i] / drafts for each place in the draft, as vLLM's per-position rate.

    Unconditional: a token counts as refused where one before it was, so they never rise.
    """
    return tuple(proportion(count, drafts) for count in accepted)


def conditional_rates(accepted: Sequence[int], drafts: int) -> tuple[Estimate | None, ...]:
    """a_i = p_i / p_(i-1), p_0 = 1: accepted at place i, given that all before it were.

    None where nothing was accepted at the place before.
    """
    reached = (drafts, *accepted)
    return tuple(
        proportion(count, before) if before else None
        for count, before in zip(accepted, reached, strict=False)
    )


def expected_tokens_per_step(n: int, rate: float) -> float:
    """(1 - a^(n+1)) / (1 - a): tokens per step if each of n places had conditional rate `rate`.

    Leviathan et al. 2023, equation 1 (arXiv 2211.17192). It holds 1 for n = 0 and n + 1 for
    a rate of 1. Raises ValueError for a negative n or a rate outside 0 to 1.
    """
    if n < 0 or not 0 <= rate <= 1:
        raise ValueError(f"n = {n} at a rate of {rate} is no draft")
    return float(sum(rate**place for place in range(n + 1)))
