"""What a conversation remembers, and what stands in the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from serving.studies.chat import Conversation, printable, run_chat, summary
from serving.studies.client import ApiFailureError, Result, Speculation
from serving.studies.overhead import servers
from serving.studies.overhead.servers import Server


class Recorder:
    """Takes the client's place at the seam and keeps what was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def chat(self, model: str, messages: list[dict[str, str]], **options: Any) -> None:
        self.asked.append((model, [dict(message) for message in messages], options))

    def completion(self, model: str, prompt: str, **options: Any) -> None:
        self.asked.append((model, prompt, options))


def ask(conversation: Conversation, text: str) -> Any:
    recorder = Recorder()
    conversation.ask(recorder, text)  # type: ignore[arg-type]
    return recorder.asked[0]


def test_a_conversation_sends_what_was_said_before() -> None:
    conversation = Conversation("tiny", {"max_tokens": 8})
    ask(conversation, "one?")
    conversation.answered("1")
    assert ask(conversation, "two?") == (
        "tiny",
        [
            {"role": "user", "content": "one?"},
            {"role": "assistant", "content": "1"},
            {"role": "user", "content": "two?"},
        ],
        {"max_tokens": 8},
    )


def test_a_question_that_failed_is_forgotten() -> None:
    conversation = Conversation("tiny", {})
    ask(conversation, "too long")
    conversation.failed()
    assert ask(conversation, "short")[1] == [{"role": "user", "content": "short"}]


def test_a_completion_remembers_nothing() -> None:
    conversation = Conversation("tiny", {}, completion=True)
    ask(conversation, "def a")
    conversation.answered("(): pass")
    assert ask(conversation, "def b") == ("tiny", "def b", {})


def test_an_answer_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b]0;title\x07\tb\r\nc") == "a\ufffd]0;title\ufffd\tb\ufffd\nc"


def test_the_line_under_an_answer_names_speed_acceptance_and_variant() -> None:
    result = Result(
        prompt_tokens=4,
        completion_tokens=21,
        ttft_s=0.05,
        duration_s=0.25,
        headers={"x-moe-serving-variant": "mtp"},
        speculation=Speculation(12, 16, 0.75, 2.5),
    )
    assert summary(result) == (
        "21 tokens · 100.0 tokens/s after the first · first after 50 ms · accepted 12 of 16 draft "
        "tokens (0.75), mean acceptance length 2.50 · variant mtp"
    )


def test_the_line_of_a_plain_server_has_only_what_is_known() -> None:
    result = Result(prompt_tokens=4, completion_tokens=1, ttft_s=float("nan"), duration_s=0.1)
    assert summary(result) == "1 tokens"


def test_one_prompt_is_answered_by_the_servers_first_model_and_summed_up(
    start: Callable[..., Server], capsys: pytest.CaptureFixture[str]
) -> None:
    url = start(servers.BARE).url
    run_chat(url, None, "hello", {"max_tokens": 3})
    assert re.fullmatch(
        r"xxx\n3 tokens · [\d.]+ tokens/s after the first · first after \d+ ms\n",
        capsys.readouterr().out,
    )


def test_a_conversation_goes_on_after_a_refusal_and_ends_with_the_input(
    start: Callable[..., Server],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = iter(["first", "  ", "second"])

    def typed(_: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", typed)
    url = start(servers.BARE, "1").url
    run_chat(url, None, None, {"max_tokens": 2})
    shown = capsys.readouterr()
    assert shown.out.startswith(
        f"tiny at {url}. Ctrl-C stops an answer, Ctrl-D ends.\nxx\n2 tokens"
    )
    assert shown.err == "\nerror: out of order (HTTP 500)\n"


def test_a_refused_prompt_is_raised(start: Callable[..., Server]) -> None:
    with pytest.raises(ApiFailureError, match="out of order"):
        run_chat(start(servers.BARE, "0").url, "tiny", "hello", {"max_tokens": 1})


def test_where_nothing_answers_the_cure_is_named() -> None:
    with pytest.raises(ApiFailureError, match="start a stack with `moe-serving up demo`, or name"):
        run_chat("http://127.0.0.1:9/v1", None, "hello", {})
