"""From a request that ended to its line in a run's folder.

Owns how a `client.Result` or failure becomes a `records.RequestRecord`. Leaves the schema and
the writing to `records`.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass

from serving.studies.client import ApiFailureError, Result, Speculation
from serving.studies.records import Drafting, RequestRecord
from serving.telemetry.repetition import distinct_4grams

# Words and signs rather than tokens, which most servers do not tell, so that texts of
# different engines compare.
WORDS = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Sent:
    """What a study knows of a request as it sends it; the fields are `RequestRecord`'s."""

    cell: str
    round: int
    arm: str
    streams: int
    """Requests in flight by design; 0 for open-loop load."""
    category: str
    prompt: str
    """Id of the prompt."""
    temperature: float
    max_tokens: int
    sent_at: float
    """Unix time."""
    draft_tokens: int | None = None
    """n of the arm; 0 plain, None not known."""
    again: bool = False
    """Whether the same was asked before, in the same round."""


def as_record(
    sent: Sent, ended: Result | ApiFailureError, *, keep_text: bool = False
) -> RequestRecord:
    """The record of a request and how it ended; `keep_text` keeps the answer itself."""
    if isinstance(ended, ApiFailureError):
        return RequestRecord(
            **asdict(sent), outcome=ended.outcome, status=ended.status, error=str(ended)
        )
    return RequestRecord(
        **asdict(sent),
        outcome="ok",
        ttft_s=None if math.isnan(ended.ttft_s) else ended.ttft_s,
        duration_s=ended.duration_s,
        prompt_tokens=ended.prompt_tokens,
        completion_tokens=ended.completion_tokens,
        chunks=ended.chunks,
        finish_reason=ended.finish_reason,
        variant=ended.headers.get("x-moe-serving-variant"),
        replica=ended.headers.get("x-moe-serving-replica"),
        drafting=_drafting(ended.speculation),
        distinct_4grams=distinct_4grams(WORDS.findall(ended.text)),
        text=ended.text if keep_text else None,
        token_ids=ended.token_ids,
        logprob_gaps=ended.logprob_gaps,
    )


def _drafting(told: Speculation | None) -> Drafting | None:
    if told is None:
        return None
    return Drafting(
        drafts=told.drafts,
        drafted=told.drafted,
        accepted=told.accepted,
        accepted_per_position=told.accepted_per_position,
    )
