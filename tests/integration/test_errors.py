"""Each failure a client can meet, in the shape its API has for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from openai import OpenAI

from tests.integration.harness import ENDLESS, PROMPT, RunningStack

KNOWN = "dense, moe, tiny-dense, tiny-moe"


def test_an_unknown_model_is_answered_with_the_known_ones(stack: RunningStack) -> None:
    reply = stack.post("/v1/completions", {"model": "tiny-mo", "prompt": PROMPT})

    assert reply.status_code == 404
    assert reply.json() == {
        "error": {
            "message": "the model 'tiny-mo' is not served here (did you mean 'tiny-moe'?); "
            f"served: {KNOWN}",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }
    }


@pytest.mark.parametrize("body", ['{"model": "tiny-moe",', "[1]", "", "[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(stack: RunningStack, body: str) -> None:
    reply = stack.http.post("/v1/chat/completions", content=body)

    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_json")
    assert error["message"].startswith("the request body is not usable: ")


def test_a_body_without_a_model_is_answered_with_the_known_ones(stack: RunningStack) -> None:
    reply = stack.post("/v1/completions", {"prompt": PROMPT})

    assert reply.status_code == 400
    message = '"model" is missing or not a string; served: tiny-moe, tiny-dense'
    assert reply.json()["error"]["message"] == message


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_refused(stack: RunningStack, chunked: bool) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(17):
            yield b" " * 65536

    reply = stack.http.post("/v1/completions", content=parts() if chunked else b"".join(parts()))

    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == "request_too_large"
    assert "gateway.max_body_mib" in reply.json()["error"]["message"]


def test_a_path_or_method_that_is_not_served_is_named(stack: RunningStack) -> None:
    unknown = stack.http.get("/v1/nothing")
    wrong = stack.http.get("/v1/completions")

    assert (unknown.status_code, wrong.status_code) == (404, 405)
    assert unknown.json()["error"]["message"] == "GET /v1/nothing is not served here"
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["/invocations", "/sleep", "/reset_prefix_cache", "/abort"])
def test_the_engines_control_endpoints_are_not_reachable(stack: RunningStack, path: str) -> None:
    assert stack.post(path, {"model": "tiny-moe"}).status_code == 404


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 10**6}),
        ("/v1/completions", {"prompt": PROMPT, "temperature": -1}),
        ("/v1/completions", {"prompt": "x " * 5000}),
        ("/v1/chat/completions", {"messages": "none"}),
        ("/v1/messages", {"messages": [], "max_tokens": -1}),
        ("/tokenize", {"prompt": [[]]}),
    ],
)
def test_the_engines_own_refusals_pass_unchanged(
    stack: RunningStack, path: str, fields: dict[str, object]
) -> None:
    body = {"model": "tiny-moe", **fields}
    engine = stack.engine("tiny-moe@mtp")
    own = httpx.post(
        engine.url + path,
        json=body,
        headers={"x-moe-serving-engine-key": engine.key},
        trust_env=False,
    )
    through = stack.post(path, body)

    assert 400 <= own.status_code < 500
    assert through.status_code == own.status_code
    assert through.content == own.content
    assert through.headers["content-type"] == own.headers["content-type"]


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/invocations", "/tokenize", "/docs"])
@pytest.mark.parametrize("key", [None, "guess"])
def test_an_engines_port_refuses_who_has_not_the_key(
    stack: RunningStack, path: str, key: str | None
) -> None:
    engine = stack.engine("tiny-moe@plain")
    headers = {"x-moe-serving-engine-key": key} if key else {}
    with httpx.Client(base_url=engine.url, headers=headers, trust_env=False) as client:
        assert client.get(path).status_code == 401
        assert client.post(path, json={}).status_code == 401
        assert client.get("/health").status_code == 200


def test_the_key_stands_in_no_log_and_no_command_line(stack: RunningStack) -> None:
    key = stack.engine("tiny-moe@plain").key
    said = [" ".join(process.cmdline()) for process in stack.processes()]

    assert (stack.home / "engine.key").stat().st_mode & 0o077 == 0
    assert not any(key in line for line in said)
    assert key not in (stack.home / "up.log").read_text(errors="replace")


@contextlib.contextmanager
def both_slots_taken(stack: RunningStack) -> Iterator[None]:
    """Two endless streams on tiny-dense, which takes two requests at a time."""
    body = {"model": "tiny-dense", "prompt": PROMPT, "stream": True, **ENDLESS}
    with contextlib.ExitStack() as open_streams:
        streams = [
            open_streams.enter_context(stack.http.stream("POST", "/v1/completions", json=body))
            for _ in range(2)
        ]
        events = [stream.iter_lines() for stream in streams]
        assert all(next(lines) for lines in events)
        yield
        assert all(next(lines) is not None for lines in events), "a stream ended too early"


def test_no_free_slot_is_answered_with_when_to_retry(
    stack: RunningStack, openai_client: OpenAI
) -> None:
    body = {"model": "tiny-dense", "prompt": PROMPT, "max_tokens": 1}
    with both_slots_taken(stack), ThreadPoolExecutor(12) as threads:
        # 8 may wait for a slot, and wait in vain; the others are turned away at once.
        replies = list(threads.map(lambda _: stack.post("/v1/completions", body), range(12)))
        with pytest.raises(openai.RateLimitError):
            openai_client.completions.create(model="tiny-dense", prompt=PROMPT)
        other = stack.post("/v1/completions", body | {"model": "tiny-moe"})

    assert [reply.status_code for reply in replies] == [429] * 12
    assert {reply.json()["error"]["code"] for reply in replies} == {"no_capacity"}
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies)
    assert other.status_code == 200


def test_a_request_that_waits_gets_the_slot_that_is_freed(stack: RunningStack) -> None:
    body = {"model": "tiny-dense", "prompt": PROMPT, "max_tokens": 1}
    with ThreadPoolExecutor(1) as threads:
        with both_slots_taken(stack):
            waiting = threads.submit(stack.post, "/v1/completions", body)
        assert waiting.result().status_code == 200
