"""Each balancing policy gets what it looks at in a request, and no more."""

from __future__ import annotations

from serving.router.balancing import PROMPT_CHARACTERS, Hint, hint_of
from serving.router.request import read_request


def test_each_policy_gets_what_it_looks_at_and_no_more() -> None:
    body = {"model": "m", "prompt": "Once upon a time"}
    request = read_request(body, {b"x-session-id": b"s-1"})
    assert hint_of("power-of-two", body, request) == Hint()
    assert hint_of("prefix-aware", body, request) == Hint(prompt="Once upon a time")
    assert hint_of("session-hash", body, request) == Hint(session="s-1")


def test_a_request_without_session_or_texts_has_an_empty_hint() -> None:
    body = {"model": "m", "prompt": [1, 2, 3]}
    request = read_request(body, {})
    assert hint_of("prefix-aware", body, request) == Hint()
    assert hint_of("session-hash", body, request) == Hint()


def test_the_prompt_is_its_beginning_only() -> None:
    body = {"model": "m", "prompt": "é" * 2 * PROMPT_CHARACTERS}
    assert hint_of("prefix-aware", body, read_request(body, {})).prompt == "é" * PROMPT_CHARACTERS
