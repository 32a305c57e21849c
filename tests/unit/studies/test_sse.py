"""Events come out the same however their bytes were split."""

from __future__ import annotations

import pytest

from serving.studies import sse
from serving.studies.sse import EventParser, EventTooLongError

STREAM = (
    ": keep-alive\n\n"
    'data: {"text": "naïve"}\n\n'
    "event: error\r\nid: 7\r\ndata:no space\r\n\r\n"
    "data: two\ndata: lines\n\n"
    ": another comment\ndata: [DONE]\n\n"
).encode()
EVENTS = ['{"text": "naïve"}', "no space", "two\nlines", "[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
def test_events_are_the_same_for_chunks_of_any_size(size: int) -> None:
    parser = EventParser()
    chunks = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    assert [event for chunk in chunks for event in parser.feed(chunk)] == EVENTS


def test_an_event_without_its_empty_line_is_not_given_out() -> None:
    parser = EventParser()
    assert parser.feed(b"data: half\n") == []
    assert parser.feed(b"\n") == ["half"]


def test_only_one_space_after_the_colon_is_taken_away() -> None:
    assert EventParser().feed(b"data:  indented\n\n") == [" indented"]


@pytest.mark.parametrize("chunk", [b"data: x", b"data: x\n"])
def test_an_event_that_never_ends_is_refused(chunk: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    parser = EventParser()
    with pytest.raises(EventTooLongError, match="more than 100 bytes"):
        for _ in range(100):
            parser.feed(chunk)
