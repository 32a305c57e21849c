"""What of a request's end goes into its record."""

from __future__ import annotations

import pytest

from serving.studies.client import ApiFailureError, Result, Speculation
from serving.studies.recording import Sent, as_record
from serving.studies.records import Drafting

SENT = Sent(
    cell="c",
    round=1,
    arm="mtp",
    streams=2,
    category="code",
    prompt="code-1",
    temperature=0,
    max_tokens=16,
    sent_at=1.5,
    draft_tokens=2,
)


def test_an_answer_is_recorded_with_what_the_server_told() -> None:
    result = Result(
        prompt_tokens=4,
        completion_tokens=11,
        ttft_s=0.5,
        duration_s=2.5,
        finish_reason="length",
        headers={"x-moe-serving-variant": "mtp", "x-moe-serving-replica": "r1"},
        speculation=Speculation(6, 8, 0.75, 2.5, 4, (4, 2)),
        chunks=5,
        text="a b c d e",
        token_ids=(1, 2),
    )
    record = as_record(SENT, result)
    assert (record.cell, record.arm, record.draft_tokens, record.sent_at) == ("c", "mtp", 2, 1.5)
    assert (record.outcome, record.variant, record.replica) == ("ok", "mtp", "r1")
    assert record.tpot_s == pytest.approx(0.2)
    assert (record.chunks, record.completion_tokens, record.token_ids) == (5, 11, (1, 2))
    assert record.drafting == Drafting(
        drafts=4, drafted=8, accepted=6, accepted_per_position=(4, 2)
    )
    assert record.distinct_4grams == 1
    assert record.text is None
    assert as_record(SENT, result, keep_text=True).text == "a b c d e"


def test_an_answer_without_text_has_no_time_to_its_first_text() -> None:
    result = Result(prompt_tokens=4, completion_tokens=1, ttft_s=float("nan"), duration_s=0.5)
    record = as_record(SENT, result)
    assert (record.ok, record.ttft_s, record.drafting) == (True, None, None)


@pytest.mark.parametrize(
    "failure",
    [
        ApiFailureError("busy (HTTP 503)", 503),
        ApiFailureError("broke", outcome="cut"),
        ApiFailureError("nothing answers", outcome="unreachable"),
    ],
)
def test_a_failure_is_recorded_as_what_it_was(failure: ApiFailureError) -> None:
    record = as_record(SENT, failure)
    assert (record.outcome, record.status, record.error) == (
        failure.outcome,
        failure.status,
        str(failure),
    )
    assert not record.ok
