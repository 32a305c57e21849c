"""The load and the mock engine agree on what is asked and answered."""

from __future__ import annotations

import json

import pytest

from serving.studies.capacity import wire
from serving.studies.capacity.wire import Asked


@pytest.mark.parametrize(
    "asked", [Asked(64, 10, True), Asked(1, 0, False), Asked(100_000, 1000, True)]
)
def test_a_request_says_what_it_asks_for(asked: Asked) -> None:
    assert wire.read_request(wire.request_body(asked)) == asked


def test_a_proxy_may_write_the_json_anew() -> None:
    asked = Asked(64, 10, True)
    body = json.loads(wire.request_body(asked))
    tight = json.dumps(dict(reversed(body.items())), separators=(",", ":")).encode()
    assert wire.read_request(tight) == asked


def test_a_prompt_has_about_its_size_whatever_it_asks_for() -> None:
    sizes = {
        len(json.loads(wire.request_body(Asked(1, pause, True)))["messages"][0]["content"])
        for pause in (0, 10, 1000)
    }
    assert all(abs(size - wire.PROMPT_BYTES) <= 8 for size in sizes)


@pytest.mark.parametrize("last", [False, True])
def test_an_event_is_a_chat_chunk_of_the_stated_size(last: bool) -> None:
    event = wire.event(last=last)
    assert len(event) == wire.EVENT_BYTES
    value = json.loads(event.removeprefix(wire.EVENT_MARK))
    assert value["choices"][0]["finish_reason"] == ("stop" if last else None)


def test_a_whole_reply_tells_its_tokens() -> None:
    assert json.loads(wire.whole_reply(64))["usage"]["completion_tokens"] == 64
