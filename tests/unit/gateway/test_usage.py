"""What an engine tells of its own reply, read from the end of its bytes."""

from __future__ import annotations

import json

import pytest

from serving.gateway.usage import TAIL_BYTES, Tail, Usage

DRAFTED = {"num_spec_steps": 4, "num_draft_tokens": 8, "num_accepted_draft_tokens": 5}


def usage_of(*chunks: bytes) -> Usage:
    tail = Tail()
    for chunk in chunks:
        tail.feed(chunk)
    return tail.usage()


def test_a_whole_reply_tells_tokens_and_drafts() -> None:
    body = {
        "choices": [{"text": "x" * 3 * TAIL_BYTES}],
        "usage": {"prompt_tokens": 3, "total_tokens": 12, "completion_tokens": 9},
        "metrics": {"speculative_decoding": DRAFTED},
    }
    assert usage_of(json.dumps(body).encode()) == Usage(3, 9, 4, 8, 5)


def test_the_last_event_that_tells_counts_though_it_came_in_parts() -> None:
    stream = (
        b'data: {"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n'
        b'data: {"usage":{"prompt_tokens":3,"completion_tokens":12}}\n\ndata: [DONE]\n\n'
    )
    chunks = [stream[i : i + 7] for i in range(0, len(stream), 7)]
    assert usage_of(*chunks)[:2] == (3, 12)


@pytest.mark.parametrize(
    "body",
    [
        b'event: message_delta\ndata: {"usage":{"input_tokens":3,"output_tokens":9}}\n\n',
        b'{"type":"response.completed","response":{"usage":{"input_tokens": 3, '
        b'"output_tokens": 9}}}',
    ],
)
def test_the_other_apis_have_their_own_names(body: bytes) -> None:
    assert usage_of(body)[:2] == (3, 9)


def test_a_models_own_text_is_not_taken_for_it() -> None:
    text = json.dumps({"text": '{"completion_tokens": 99}'}).encode()
    assert usage_of(text) == Usage(None, None, None, None, None)


def test_of_a_long_reply_only_the_end_is_kept() -> None:
    tail = Tail()
    for _ in range(100):
        tail.feed(b"x" * TAIL_BYTES)
    assert len(tail._kept) <= 2 * TAIL_BYTES
