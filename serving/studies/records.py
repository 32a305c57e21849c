"""What a study leaves behind: one line per request, and one description of the run.

Owns the schema of a run's folder and its reading and writing. `requests.jsonl` has one
`RequestRecord` per line, in the order they ended; `study.json` is one `StudyRecord`.
Leaves what the figures mean to `statistics` and `analysis`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

REQUESTS = "requests.jsonl"
STUDY = "study.json"

Seconds = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


class RecordsError(ValueError):
    """A run's folder cannot be read; the text names file, line and cure."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Drafting(_Record):
    """What an engine drafted for one answer, by its own count."""

    drafts: Count = Field(description="steps that drafted")
    drafted: Count = Field(description="draft tokens")
    accepted: Count = Field(description="draft tokens that were accepted")
    accepted_per_position: tuple[int, ...] | None = Field(
        default=None, description="accepted tokens by place in the draft, where the engine tells"
    )
    source: Literal["request", "counters"] = Field(
        default="request",
        description="told with the answer, or an engine's counters before and after it",
    )


class RequestRecord(_Record):
    """One request of a study and how it ended. Times in seconds."""

    cell: str = Field(description="id of the cell of the schedule it belongs to")
    round: Count = Field(description="which repetition, from 0")
    arm: str = Field(description="what is compared, a variant or an endpoint, by its name")
    draft_tokens: Count | None = Field(
        default=None, description="n of the arm; 0 plain, null not known"
    )
    streams: Count = Field(description="requests in flight by design; 0 for open-loop load")
    category: str
    prompt: str = Field(description="id of the prompt: comparisons are paired by it")
    temperature: float = Field(ge=0)
    max_tokens: int = Field(ge=1)
    sent_at: float = Field(description="Unix time")
    outcome: Literal["ok", "refused", "cut", "unreachable"]
    status: int | None = Field(default=None, description="HTTP status of a refusal")
    error: str | None = None
    ttft_s: Seconds | None = Field(default=None, description="to the first text; null: none came")
    duration_s: Seconds | None = None
    prompt_tokens: Count | None = Field(default=None, description="by the server's usage")
    completion_tokens: Count | None = Field(default=None, description="by the server's usage")
    chunks: Count | None = Field(default=None, description="stream events that carried text")
    finish_reason: str | None = None
    variant: str | None = Field(default=None, description="reply header x-moe-serving-variant")
    replica: str | None = Field(default=None, description="reply header x-moe-serving-replica")
    drafting: Drafting | None = None
    distinct_4grams: float | None = Field(
        default=None, ge=0, le=1, description="share of different 4-grams in the answer"
    )
    text: str | None = Field(default=None, description="the answer, where the study keeps texts")
    token_ids: tuple[int, ...] | None = None
    logprob_gaps: tuple[float, ...] | None = Field(
        default=None, description="log-probability of the first choice minus the second, by token"
    )
    again: bool = Field(
        default=False,
        description="plain's last pass: asked before in the same round, for drift and sameness",
    )

    @property
    def ok(self) -> bool:
        """Whether a whole answer came."""
        return self.outcome == "ok"

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first: (duration - TTFT) / (tokens - 1)."""
        tokens = self.completion_tokens or 0
        if self.duration_s is None or self.ttft_s is None or tokens < 2:
            return None
        return (self.duration_s - self.ttft_s) / (tokens - 1)


class Arm(_Record):
    """One of the things compared."""

    name: str
    url: str
    model: str = Field(description="name the requests ask for")
    draft_tokens: Count | None = None
    engine: str = "vllm"


EventKind = Literal[
    "interrupted",
    "resumed",
    "out_of_time",
    "engine_not_started",
    "engine_lost",
    "engine_back",
    "arm_left_out",
]
_ROUTINE: frozenset[EventKind] = frozenset({"interrupted", "resumed", "out_of_time"})


class Event(_Record):
    """Something that happened to a run besides its requests."""

    at: float = Field(description="Unix time")
    kind: EventKind
    text: str

    @property
    def disturbs(self) -> bool:
        """Whether the figures may suffer from it; ending a run and taking it up again do not."""
        return self.kind not in _ROUTINE


class StudyRecord(_Record):
    """One run of a study: what was asked, of what, where and when."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    id: str
    name: str
    question: str = Field(description="what the study is to answer, in a sentence")
    arms: tuple[Arm, ...]
    plain: str | None = Field(description="name of the arm that speed-ups are over")
    gpu: str = Field(description="GPU class, an id of configs/gpus")
    environment: dict[str, str] = Field(description="machine, driver and versions")
    commit: str | None = None
    stack: dict[str, Any] | None = Field(default=None, description="the stack file, as resolved")
    spec: dict[str, Any] = Field(description="the study file, as resolved")
    started_at: float
    ended_at: float | None = None
    events: tuple[Event, ...] = Field(default=(), description="in the order they happened")
    energy_j: dict[str, float] | None = Field(
        default=None, description="joules by arm, where the hardware tells"
    )

    @property
    def arm_names(self) -> tuple[str, ...]:
        """The arms' names, plain first."""
        return tuple(sorted((arm.name for arm in self.arms), key=lambda name: name != self.plain))


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder, read."""

    study: StudyRecord
    requests: tuple[RequestRecord, ...]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The run in `folder`; raises RecordsError."""
        return cls(read_study(folder), tuple(read_requests(folder)))


def read_study(folder: Path) -> StudyRecord:
    """The run's description; raises RecordsError."""
    file = folder / STUDY
    try:
        return StudyRecord.model_validate_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordsError(f"{file}: {error.strerror}; is {folder} a study's folder?") from error
    except ValidationError as error:
        raise RecordsError(f"{file}: {_first(error)}") from error


def write_study(folder: Path, study: StudyRecord) -> None:
    """Write the run's description; a cut-off write leaves the one before in place."""
    partial = folder / f"{STUDY}.partial"
    partial.write_text(study.model_dump_json(indent=2, by_alias=True) + "\n", encoding="utf-8")
    partial.replace(folder / STUDY)


def read_requests(folder: Path) -> Iterator[RequestRecord]:
    """The records of `folder`; raises RecordsError. A cut-off last line is left out."""
    file = folder / REQUESTS
    if not file.exists():
        return
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            yield RequestRecord.model_validate_json(line)
        except ValidationError as error:
            if number == len(lines) and not line.endswith("\n"):
                return
            raise RecordsError(f"{file}, line {number}: {_first(error)}") from error


def append_request(folder: Path, record: RequestRecord) -> None:
    """Add one line, whole or not at all as far as a reader is concerned."""
    line = json.dumps(record.model_dump(mode="json", exclude_none=True))
    with (folder / REQUESTS).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def _first(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in problem["loc"]) or "the file"
    return f"{where}: {problem['msg']}"
