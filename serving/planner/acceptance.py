"""How many drafted tokens are accepted: given, measured by a study, or a prior.

Owns turning a rate, rates by position or a workload into the share of drafts accepted
at each position, and so the expected tokens per step. Leaves what a step costs to `speed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from serving.planner.errors import PlannerError

# Draft acceptance with two draft tokens, by workload: the middles of the ranges that the seed
# measurements gave (code 0.80 to 0.86; text 0.65 to 0.82 dense, 0.55 to 0.76 for the 35B).
# `mixed` is the mean of code and text; creative writing was only said to be lower.
CODE, DENSE_TEXT, MOE_TEXT, CREATIVE = 0.83, 0.735, 0.655, 0.55
PRIOR_DRAFT_TOKENS = 2
WORKLOADS = ("mixed", "code", "chat", "creative")
PRIOR_SOURCE = "prior by workload, from the seed measurements (configs/anchors.json)"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Share of steps that accept at least 1, 2, ... drafts (vLLM's per-position rate)."""

    positions: tuple[float, ...]
    source: str

    def __post_init__(self) -> None:
        given = ", ".join(f"{rate:g}" for rate in self.positions)
        if not self.positions or not all(0 <= rate <= 1 for rate in self.positions):
            raise PlannerError(
                f"acceptance: found [{given}]; give shares from 0 to 1, one per position"
            )
        pairs = zip(self.positions, self.positions[1:], strict=False)
        if any(later > earlier for earlier, later in pairs):
            raise PlannerError(
                f"acceptance: found [{given}], which rises; give the share of steps that accept "
                "at least 1, 2, ... drafts, as vLLM's per-position rates do"
            )

    def at(self, position: int) -> float:
        """The share of steps that accept at least `position` drafts, `position` from 1.

        Beyond what was given the last conditional rate goes on.
        """
        known = self.positions
        if position <= len(known):
            return known[position - 1]
        before = known[-2] if len(known) > 1 else 1.0
        conditional = known[-1] / before if before else 0.0
        return float(known[-1] * conditional ** (position - len(known)))

    def expected_length(self, draft_tokens: int) -> float:
        """Tokens per step, E(n) = 1 + p_1 + ... + p_n (vLLM's mean acceptance length)."""
        return 1.0 + sum(self.at(i) for i in range(1, draft_tokens + 1))

    def rate(self, draft_tokens: int) -> float:
        """Accepted over drafted tokens with n drafts per step."""
        return (self.expected_length(draft_tokens) - 1) / draft_tokens if draft_tokens else 0.0


def from_positions(rates: Sequence[float], source: str = "given by position") -> Acceptance:
    """Acceptance as the shares of steps accepting at least 1, 2, ... drafts."""
    return Acceptance(tuple(rates), source)


def from_rate(rate: float, draft_tokens: int, source: str = "given") -> Acceptance:
    """Acceptance whose rate with `draft_tokens` drafts is `rate`.

    Each position is taken to be accepted with the same probability a, given that the one
    before was: p_i = a^i (Leviathan et al. 2023). a is solved for. Raises PlannerError.
    """
    if not 0 <= rate <= 1:
        raise PlannerError(f"acceptance: found {rate:g}; give accepted / drafted, from 0 to 1")
    if draft_tokens < 1:
        raise PlannerError(f"draft_tokens: found {draft_tokens}; give the n that was measured")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, draft_tokens + 1)) < rate * draft_tokens:
            low = middle
        else:
            high = middle
    conditional = 1.0 if rate == 1 else low
    return Acceptance(tuple(conditional**i for i in range(1, draft_tokens + 1)), source)


def prior(workload: str, *, experts: bool) -> Acceptance:
    """What to expect of a workload before anything is measured; raises PlannerError.

    `experts`: whether the model is a mixture of experts.
    """
    text = MOE_TEXT if experts else DENSE_TEXT
    rates = {"code": CODE, "chat": text, "creative": CREATIVE, "mixed": (CODE + text) / 2}
    if workload not in rates:
        raise PlannerError(f"workload: found {workload!r}; choose {', '.join(WORKLOADS)}")
    return from_rate(rates[workload], PRIOR_DRAFT_TOKENS, f"{workload}: {PRIOR_SOURCE}")


def from_study(folder: Path) -> Acceptance:
    """What the study in `folder` measured, of its arm with the most draft tokens.

    By position where its engine told, else from its rate. Raises PlannerError.
    """
    from serving.studies.records import RecordsError, Run

    try:
        run = Run.read(folder)
    except RecordsError as error:
        raise PlannerError(f"acceptance-from: {error}") from error
    drafted = [each for each in run.requests if each.ok and each.drafting and each.draft_tokens]
    if not drafted:
        raise PlannerError(
            f"acceptance-from: no answer in {folder} tells what was drafted; name a study with "
            "an arm that drafts, or give --acceptance"
        )
    most = max(each.draft_tokens or 0 for each in drafted)
    counts = [each.drafting for each in drafted if each.draft_tokens == most and each.drafting]
    source = f"study {run.study.id}, n = {most}"
    steps = sum(each.drafts for each in counts)
    places = [each.accepted_per_position for each in counts]
    if steps and all(places):
        sums = [sum(place) for place in zip(*(each or () for each in places), strict=False)]
        return Acceptance(tuple(count / steps for count in sums), source)
    tokens = sum(each.drafted for each in counts)
    if not tokens:
        raise PlannerError(f"acceptance-from: {folder} counts no drafted token; check its drafter")
    return from_rate(sum(each.accepted for each in counts) / tokens, most, source)
