"""What this machine's CPU does: its memory bandwidth and an engine's fixed costs on it.

Owns measuring the bandwidth, taking fixed costs out of measured speed-ups, and the file
that remembers both. Leaves using them to `plan`. Needs nothing beyond the standard library.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from serving.catalog.models import ModelEntry
from serving.demo import MODELS_DIR
from serving.planner.constants import VLLM_CPU, EngineFamily
from serving.planner.errors import PlannerError
from serving.planner.speed import Setup, step_time

FILE = "cpu-calibration.json"
# Far beyond any cache of a processor, and small enough for a small machine.
BUFFER_BYTES = 256 * 1024**2
PASSES = 7


@dataclass(frozen=True, slots=True)
class Point:
    """One measured speed-up: n, the tokens per step that n gave, and the gain over n = 0."""

    draft_tokens: int
    tokens_per_step: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured here. Times in seconds, bandwidth in bytes/s."""

    bandwidth: float
    step_s: float
    draft_s: float
    speculation_s: float
    overhead_source: str

    @property
    def family(self) -> EngineFamily:
        """vLLM on this CPU."""
        return replace(
            VLLM_CPU,
            step_s=self.step_s,
            draft_s=self.draft_s,
            speculation_s=self.speculation_s,
        )


def measure_bandwidth(buffer_bytes: int = BUFFER_BYTES, passes: int = PASSES) -> float:
    """Bytes/s of copying memory with one thread, reads and writes counted; the best pass.

    As STREAM's copy counts it. Engines on small machines use one thread as well.
    """
    source, target = bytearray(buffer_bytes), bytearray(buffer_bytes)
    best = float("inf")
    for _ in range(passes):
        start = time.perf_counter()
        memoryview(target)[:] = source
        best = min(best, time.perf_counter() - start)
    return 2 * buffer_bytes / best


def fixed_costs(setup: Setup, plain_step_s: float, points: Sequence[Point]) -> tuple[float, float]:
    """(seconds per step with drafts, seconds per drafted token) beyond what is modelled.

    A step with n drafts took E(n) T(0) / S(n). What the model says of reading and
    computing is taken off; a line through the rest has the first as its intercept and the
    second as its slope, neither below 0. Raises PlannerError for fewer than two n.
    """
    if len({point.draft_tokens for point in points}) < 2:
        raise PlannerError("calibrate: give speed-ups of two numbers of draft tokens at least")
    bare = replace(setup, family=replace(setup.family, step_s=0.0, draft_s=0.0, speculation_s=0.0))
    modelled = {n: step_time(bare, n).total for n in {0, *(p.draft_tokens for p in points)}}
    rest = [
        plain_step_s * (point.tokens_per_step / point.speedup - 1)
        - (modelled[point.draft_tokens] - modelled[0])
        for point in points
    ]
    counts = [float(point.draft_tokens) for point in points]
    line = statistics.linear_regression(counts, rest)
    if line.slope < 0:
        return max(0.0, statistics.mean(rest)), 0.0
    if line.intercept < 0:
        through_zero = statistics.linear_regression(counts, rest, proportional=True)
        return 0.0, max(0.0, through_zero.slope)
    return line.intercept, line.slope


def calibrate(
    model: ModelEntry, setup: Setup, points: Sequence[Point], plain_step_s: float, source: str
) -> Calibration:
    """The calibration that `points` of `model` on this machine give; raises PlannerError."""
    speculation, draft = fixed_costs(setup, plain_step_s, points)
    bare = replace(setup, family=replace(setup.family, step_s=0.0))
    return Calibration(
        bandwidth=setup.machine.bandwidth,
        step_s=max(0.0, plain_step_s - step_time(bare).total),
        draft_s=draft,
        speculation_s=speculation,
        overhead_source=f"{model.id}: {source}",
    )


_CARD_ROW = re.compile(
    r"^\| (?P<n>\d+) \| (?P<temperature>greedy|[\d.]+) \| (?P<acceptance>[\d.]*) \|.*"
    r"\| (?P<speedup>[\d.]+)( \([^)]*\))? \|$",
    re.MULTILINE,
)


def card_of(model_id: str) -> Path:
    """The model card of a demo model."""
    return MODELS_DIR / model_id / "README.md"


def points_of_card(card: Path, temperature: str = "greedy") -> list[Point]:
    """The speed-ups of a demo model's card at one temperature; raises PlannerError."""
    try:
        text = card.read_text(encoding="utf-8")
    except OSError as error:
        raise PlannerError(
            f"card: {card}: {error.strerror}; tiny-moe's is shipped, or measure one with "
            "python -m serving.demo.measure"
        ) from error
    found = [
        Point(n, 1 + n * float(row["acceptance"]), float(row["speedup"]))
        for row in _CARD_ROW.finditer(text)
        if row["temperature"] == temperature and (n := int(row["n"]))
    ]
    if not found:
        raise PlannerError(f"card: no table of speed-ups in {card}; name another model card")
    return found


def points_of_study(folder: Path) -> tuple[list[Point], float]:
    """Speed-ups and the plain step, seconds, of a study at one stream; raises PlannerError."""
    from serving.studies.records import RecordsError, Run

    try:
        run = Run.read(folder)
    except RecordsError as error:
        raise PlannerError(f"study: {error}") from error
    tpot: dict[int, list[float]] = {}
    lengths: dict[int, list[float]] = {}
    for each in run.requests:
        if not each.ok or each.streams != 1 or each.tpot_s is None or each.draft_tokens is None:
            continue
        tpot.setdefault(each.draft_tokens, []).append(each.tpot_s)
        if each.drafting and each.drafting.drafts:
            length = 1 + each.drafting.accepted / each.drafting.drafts
            lengths.setdefault(each.draft_tokens, []).append(length)
    if 0 not in tpot or not lengths:
        raise PlannerError(
            f"study: {folder} has no plain arm and arms that draft at one stream; run n-sweep"
        )
    plain = statistics.median(tpot[0])
    points = [
        Point(n, statistics.mean(lengths[n]), plain / statistics.median(tpot[n]))
        for n in sorted(lengths)
    ]
    return points, plain


def write_calibration(folder: Path, found: Calibration) -> Path:
    """Remember `found` in the state folder; raises PlannerError where that cannot be written."""
    file = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise PlannerError(f"{file}: {error.strerror}; set MOE_SERVING_HOME") from error
    return file


def read_calibration(folder: Path) -> Calibration | None:
    """What was remembered, None where nothing was; raises PlannerError for a broken file."""
    file = folder / FILE
    if not file.exists():
        return None
    try:
        return Calibration(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise PlannerError(
            f"{file}: cannot be read ({error}); run `moe-serving plan calibrate` again"
        ) from error
