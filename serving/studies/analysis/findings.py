"""What is concluded from a run, as values.

Owns what each finding says and its units. Leaves how one comes about to the modules beside
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from serving.studies.records import StudyRecord
from serving.studies.statistics import Estimate, Verdict


@dataclass(frozen=True, slots=True)
class Setting:
    """What is held equal in a comparison."""

    category: str | None
    """None: all categories together."""
    streams: int
    """0 for open-loop load."""
    max_tokens: int
    temperature: float

    @property
    def order(self) -> tuple[float, int, int, str]:
        """Sorts settings; within a load, all categories together come first."""
        return self.temperature, self.streams, self.max_tokens, self.category or ""


@dataclass(frozen=True, slots=True)
class Speedup:
    """One arm over plain in one setting; above 1 the arm is faster."""

    arm: str
    setting: Setting
    pairs: int
    """Of prompt and round, answered by both."""
    prompts: int
    """Different ones; `code-3#2` is `code-3` asked once more in a round."""
    decode: Estimate | None
    """By decode tokens/s, 1 / TPOT: ratio of paired medians. None: no answer of 2 tokens."""
    end_to_end: Estimate
    """By time from request to end, the prompt's processing included: ratio of paired medians."""
    by_mean_tokens_per_s: float | None
    """Ratio of the mean decode tokens/s, one of the two that people quote."""
    by_wall_clock: float
    """Plain's time for the whole set over the arm's, the other one."""


@dataclass(frozen=True, slots=True)
class Load:
    """One arm in one setting, all categories together. Times in seconds, of whole answers."""

    arm: str
    setting: Setting
    requests: int
    errors: int
    tokens_per_s: float | None
    """Output tokens of all streams by the time in which at least one request ran."""
    ttft_median_s: float | None
    ttft_p95_s: float | None
    tpot_median_s: float | None
    tpot_p95_s: float | None


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What one arm drafted and how much of it was kept; None where it cannot be told."""

    arm: str
    category: str | None
    """None: all categories together."""
    temperature: float
    drafts: int
    drafted: int
    accepted: int
    rate: Estimate
    mean_length: float | None
    """Tokens per step by the engine's counts, its own included."""
    per_position: tuple[Estimate, ...]
    conditional: tuple[Estimate | None, ...]
    expected_tokens_per_step: float | None
    """If every place were accepted like the first: `statistics.expected_tokens_per_step`."""
    tokens_per_chunk: float | None
    """Tokens per stream event after the first, at 1 stream: the client's own measure."""


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest variant in one setting, and whether that is more than chance."""

    setting: Setting
    arm: str
    """The variant with the largest decode speed-up, of those faster than plain if any are."""
    speedup: Estimate
    no_difference_from: tuple[str, ...]
    """Other variants whose interval overlaps with its own."""

    @property
    def verdict(self) -> Verdict:
        """The variant against plain."""
        return self.speedup.verdict


@dataclass(frozen=True, slots=True)
class Crossover:
    """From how many streams on drafting stops to pay, by decode speed."""

    arm: str
    category: str | None
    max_tokens: int
    temperature: float
    tried: tuple[int, ...]
    gain_gone_from: int | None
    """Fewest streams tried from which on the arm is not faster; None: faster to the last."""
    plain_faster_from: int | None
    """Fewest streams tried at which plain is faster, and beyond which the arm never is."""


@dataclass(frozen=True, slots=True)
class BreakEven:
    """From which output length on drafting pays, the time to the first token included."""

    arm: str
    category: str | None
    streams: int
    temperature: float
    tried: tuple[int, ...]
    """Values of max_tokens."""
    faster_from: int | None
    """Shortest length tried from which on the arm is always faster; None: not at the longest."""
    plain_faster_to: int | None
    """Longest length tried below that at which plain is faster; None: never seen."""


@dataclass(frozen=True, slots=True)
class Flag:
    """Something a reader must know before believing the figures."""

    name: str
    text: str
    arm: str | None = None
    category: str | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Analysis:
    """Everything that is concluded from one run."""

    study: StudyRecord
    variants: Mapping[str, str]
    """Arm → variant that answered, by the replies' headers; else the arm's own name."""
    speedups: tuple[Speedup, ...]
    loads: tuple[Load, ...]
    acceptances: tuple[Acceptance, ...]
    best: tuple[Best, ...]
    crossovers: tuple[Crossover, ...]
    break_evens: tuple[BreakEven, ...]
    joules_per_token: Mapping[str, float]
    """By arm, where the hardware tells energy."""
    flags: tuple[Flag, ...]
    measured_tokens: int
    """Output tokens of all whole answers."""
    context_tokens: int
    """Longest prompt and answer."""
