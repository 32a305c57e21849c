"""Predictions beside published measurements: `moe-serving plan validate`.

Owns the form of an anchors file, what is assumed where a row leaves something out, and
the errors. A row that cannot be predicted is listed with the reason, never left out in
silence. Leaves the model itself to `speed`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.catalog import configs_dir, find_gpu, find_model
from serving.catalog.errors import CatalogError
from serving.catalog.gpus import GpuClass
from serving.catalog.models import ModelEntry
from serving.planner.acceptance import Acceptance, from_positions, from_rate, prior
from serving.planner.constants import CONSTANTS, Constants, EngineFamily, find_family
from serving.planner.errors import PlannerError
from serving.planner.machine import machine_of
from serving.planner.speed import Setup, Target, decode
from serving.planner.weight_names import precision_of_name

# Tokens behind each request where a row tells no context: a short prompt and half an answer.
ASSUMED_CONTEXT = 512
# Same shapes, other name.
SAME_ARCHITECTURE = {
    "qwen3.5-27b": "qwen3.6-27b",
    "qwen3.5-35b-a3b": "qwen3.6-35b-a3b",
    "gemma-4-31b": "gemma-4",
    "gemma-4-31b-it": "gemma-4",
}
Resolve = Callable[[str], EngineFamily]


@dataclass(frozen=True, slots=True)
class Prediction:
    """One row's prediction. Errors are predicted over published, minus 1."""

    id: str
    engine: str
    plain: float
    mtp: float
    speedup: float
    published_plain: float | None
    published_mtp: float | None
    draft_tokens: int
    assumed: tuple[str, ...] = ()

    @property
    def published_speedup(self) -> float | None:
        """Published MTP over published plain tokens/s."""
        if self.published_plain is None or self.published_mtp is None:
            return None
        return self.published_mtp / self.published_plain

    @property
    def plain_error(self) -> float | None:
        """Of plain tokens/s."""
        return _error(self.plain, self.published_plain)

    @property
    def mtp_error(self) -> float | None:
        """Of tokens/s while drafting."""
        return _error(self.mtp, self.published_mtp)

    @property
    def speedup_error(self) -> float | None:
        """Of the speed-up."""
        return _error(self.speedup, self.published_speedup)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that cannot be predicted, and why."""

    id: str
    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class Medians:
    """Median absolute errors of a group of rows; None where no row has one."""

    rows: int
    speedup: float | None
    plain: float | None


@dataclass(frozen=True, slots=True)
class Validation:
    """All rows of a file, and how far off the predictions are."""

    rows: tuple[Prediction | Skipped, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def predicted(self) -> tuple[Prediction, ...]:
        """The rows that could be predicted, in the file's order."""
        return tuple(row for row in self.rows if isinstance(row, Prediction))

    def medians(self, engine: str | None = None) -> Medians:
        """Over all rows, or over those of one engine as the file names it."""
        rows = [row for row in self.predicted if engine in (None, row.engine)]
        return Medians(
            rows=len(rows),
            speedup=_median_abs(row.speedup_error for row in rows),
            plain=_median_abs(row.plain_error for row in rows),
        )

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines of the predicted rows, in order of their names."""
        return tuple(sorted({row.engine for row in self.predicted}))


def shipped_anchors() -> Path:
    """The published measurements that come with this package."""
    return configs_dir() / "anchors.json"


def validate_file(file: Path, constants: Constants = CONSTANTS) -> Validation:
    """Predict every row of `file`; raises PlannerError where it is no anchors file."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlannerError(f"{file}: {error.strerror}; name an anchors file") from error
    except ValueError as error:
        raise PlannerError(f"{file}: not JSON ({error}); see configs/anchors.json") from error
    rows = data.get("rows") if isinstance(data, dict) else data
    if not isinstance(rows, list):
        raise PlannerError(f"{file}: no list `rows`; see configs/anchors.json for the form")
    bandwidths = data.get("bandwidth_gb_s") if isinstance(data, dict) else None
    return Validation(
        rows=tuple(predict_row(row, number, constants) for number, row in enumerate(rows, 1)),
        notes=tuple(_bandwidth_notes(bandwidths)),
    )


def predict_row(
    row: Any,
    number: int = 1,
    constants: Constants = CONSTANTS,
    resolve: Resolve = find_family,
) -> Prediction | Skipped:
    """One row predicted, or why it cannot be. `number` names a row that has no id."""
    if not isinstance(row, Mapping):
        return Skipped(f"row {number}", "", f"found {row!r}; a row is an object")
    row_id, engine = str(row.get("id") or f"row {number}"), str(row.get("engine") or "")
    try:
        return _predict(row, row_id, engine, constants, resolve)
    except CatalogError as error:
        return Skipped(row_id, engine, str(error))


def _predict(
    row: Mapping[str, Any], row_id: str, engine: str, constants: Constants, resolve: Resolve
) -> Prediction:
    assumed: list[str] = []
    family = resolve(engine)
    entry, gpu = _model(row.get("model"), assumed), _gpu(row.get("gpu"))
    weights = row.get("weights")
    name = None if weights is None else str(weights)
    precision = precision_of_name(name, entry, family, gpu)
    if name is None:
        assumed.append(f"weights {precision.name}")
    cards = _cards(row, family, assumed)
    drafts = _count(row, "n")
    if drafts is None:
        drafts = family.default_draft_tokens
        assumed.append(f"n = {drafts}")
    concurrency = _count(row, "concurrency") or 1
    acceptance = _acceptance(row, drafts, entry, assumed)
    setup = Setup(Target.of(entry, precision), machine_of(gpu, cards), family, constants)
    predicted = decode(
        setup,
        drafts,
        acceptance,
        concurrency=concurrency,
        context=_count(row, "context") or ASSUMED_CONTEXT,
    )
    return Prediction(
        id=row_id,
        engine=engine,
        plain=concurrency / predicted.plain_step_s,
        mtp=predicted.tokens_per_s,
        speedup=predicted.speedup,
        published_plain=_positive(row, "plain_tok_s"),
        published_mtp=_positive(row, "mtp_tok_s"),
        draft_tokens=drafts,
        assumed=tuple(assumed),
    )


def _model(name: Any, assumed: list[str]) -> ModelEntry:
    wanted = str(name or "").lower().rpartition("/")[2].replace("_", "-")
    if wanted in SAME_ARCHITECTURE:
        assumed.append(f"the shapes of {SAME_ARCHITECTURE[wanted]}")
        wanted = SAME_ARCHITECTURE[wanted]
    return find_model(wanted)


def _gpu(name: Any) -> GpuClass:
    wanted = str(name or "").lower()
    for word in ("nvidia", "geforce", " ", "_"):
        wanted = wanted.replace(word, "")
    return find_gpu(wanted)


def _cards(row: Mapping[str, Any], family: EngineFamily, assumed: list[str]) -> int:
    """Cards that read weights at the same time.

    llama.cpp gives each card its layers unless told to split tensors, and one card after
    the other works; vLLM splits every layer.
    """
    cards = _count(row, "gpus") or 1
    if cards == 1 or family.vector_fraction is None:
        return cards
    told = " ".join(str(row.get(key) or "") for key in ("id", "source", "split", "notes")).lower()
    if "tensor" in told or "tp" in told.replace("-", " ").split():
        return cards
    assumed.append("layers split over the cards, which work one after the other")
    return 1


def _acceptance(
    row: Mapping[str, Any], drafts: int, entry: ModelEntry, assumed: list[str]
) -> Acceptance:
    positions, rate = row.get("per_position"), row.get("draft_acceptance")
    if positions is not None:
        if not isinstance(positions, list) or not all(_is_number(each) for each in positions):
            raise PlannerError(f"per_position: found {positions!r}; give a list of shares")
        return from_positions(positions, "published, by position")
    if rate is not None:
        if not _is_number(rate):
            raise PlannerError(f"draft_acceptance: found {rate!r}; give a share from 0 to 1")
        return from_rate(float(rate), max(1, drafts), "published")
    workload = str(row.get("workload") or "mixed")
    assumed.append(f"acceptance of the prior for {workload} text")
    return prior(workload, experts=entry.architecture.experts is not None)


def _count(row: Mapping[str, Any], key: str) -> int | None:
    value = row.get(key)
    if value is None:
        return None
    if not _is_number(value) or value != int(value) or value < 0:
        raise PlannerError(f"{key}: found {value!r}; give a whole number, 0 or more")
    return int(value)


def _positive(row: Mapping[str, Any], key: str) -> float | None:
    value = row.get(key)
    if value is None:
        return None
    if not _is_number(value) or value <= 0:
        raise PlannerError(f"{key}: found {value!r}; give tokens per second, above 0")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _error(predicted: float, published: float | None) -> float | None:
    return None if published is None else predicted / published - 1


def _median_abs(errors: Iterable[float | None]) -> float | None:
    known = [abs(error) for error in errors if error is not None]
    return statistics.median(known) if known else None


def _bandwidth_notes(table: Any) -> list[str]:
    """Where the file's bandwidths are not the catalogue's."""
    notes = []
    for name, value in (table if isinstance(table, Mapping) else {}).items():
        try:
            known = _gpu(name).bandwidth_gb_s
        except CatalogError:
            continue
        if known is not None and known != value:
            notes.append(
                f"{name}: the file has {value} GB/s, the catalogue {known:g}, which is used"
            )
    return notes
