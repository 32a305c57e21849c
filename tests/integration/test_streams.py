"""What a client reads of a stream: as it comes, alive while silent, whole at the end."""

from __future__ import annotations

import json

import pytest

from tests.integration.harness import PROMPT, RunningStack, halted


@pytest.mark.parametrize(
    ("path", "question", "last"),
    [
        ("/v1/completions", {"prompt": PROMPT}, "data: [DONE]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}, "[DONE]"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": PROMPT}]},
            '"message_stop"',
        ),
    ],
)
def test_a_silent_stream_carries_comments_and_goes_on(
    stack: RunningStack, path: str, question: dict[str, object], last: str
) -> None:
    core = stack.engine("tiny-moe@mtp").core
    body = {"model": "tiny-moe", "max_tokens": 512, "ignore_eos": True, "stream": True}
    read: list[str] = []
    with halted(core), stack.http.stream("POST", path, json={**body, **question}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.iter_lines()
        while sum(line == ": keep-alive" for line in read) < 2:
            read.append(next(lines))
        core.resume()
        read += lines

    data = [line[5:].strip() for line in read if line.startswith("data:")]
    events = [json.loads(text) for text in data if text != "[DONE]"]
    assert events
    assert not any("error" in event for event in events)
    assert last in "\n".join(line for line in read if line)[-400:]
    # Nothing but whole events, comments and the empty lines between them.
    assert all(line.split(":")[0] in ("", "data", "event") for line in read)
