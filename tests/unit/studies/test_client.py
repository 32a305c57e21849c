"""The client against a real HTTP server on loopback."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from serving.studies.client import (
    ApiFailureError,
    Client,
    Clock,
    Piece,
    Reading,
    Result,
    Speculation,
    chat_request,
    completion_request,
    error_text,
    prompt_request,
)
from serving.studies.prompts import Prompt

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
SPECULATIVE = {
    "mean_acceptance_length": 2.5,
    "draft_acceptance_rate": 0.75,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 4,
    "acceptance_histogram": [0, 1, 1],
    "num_spec_steps": 2,
    "num_spec_tokens": 2,
}


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text_event(text: str, finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish_reason}])


def delta_event(**delta: str) -> bytes:
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": None}])


DONE = b"data: [DONE]\n\n"
ENDING = event(choices=[], usage=USAGE) + DONE
ANSWER = (
    text_event("a"),
    b": keep-alive\n\n",
    text_event("b"),
    text_event("", "length"),
    event(choices=[], usage=USAGE),
    DONE,
)


def streaming(*chunks: bytes, **headers: str) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(
            headers={name.replace("_", "-"): value for name, value in headers.items()}
            | {"content-type": "text/event-stream"}
        )
        await reply.prepare(request)
        for chunk in chunks:
            await reply.write(chunk)
            await asyncio.sleep(0)
        return reply

    return handle


def answering(status: int, body: Any) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        if isinstance(body, str):
            return web.Response(status=status, text=body)
        return web.json_response(body, status=status)

    return handle


@asynccontextmanager
async def serving(
    handler: Handler, api_key: str | None = None, clock: Clock = time.perf_counter
) -> AsyncIterator[Client]:
    """A client of a server that answers everything with `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        url = f"http://127.0.0.1:{port}/v1/"
        async with Client(url, api_key=api_key, clock=clock) as client:
            yield client
    finally:
        await runner.cleanup()


async def completed(client: Client) -> tuple[list[Piece], Result]:
    stream = client.completion("tiny", "def", max_tokens=3)
    pieces = [piece async for piece in stream]
    return pieces, stream.result


async def test_pieces_and_usage_of_a_completion_are_read() -> None:
    async with serving(streaming(*ANSWER)) as client:
        pieces, result = await completed(client)
    assert pieces == [Piece("a"), Piece("b")]
    assert (result.prompt_tokens, result.completion_tokens) == (5, 3)
    assert result.finish_reason == "length"
    assert result.speculation is None
    assert 0 < result.ttft_s <= result.duration_s


async def test_a_stream_cut_into_single_bytes_reads_the_same() -> None:
    chunks = [bytes([byte]) for byte in b"".join(ANSWER)]
    async with serving(streaming(*chunks)) as client:
        pieces, _ = await completed(client)
    assert pieces == [Piece("a"), Piece("b")]


async def test_time_per_output_token_is_counted_by_tokens_not_by_chunks() -> None:
    result = Result(prompt_tokens=1, completion_tokens=11, ttft_s=0.5, duration_s=2.5)
    assert result.tpot_s == pytest.approx(0.2)
    one = Result(prompt_tokens=1, completion_tokens=1, ttft_s=0.5, duration_s=0.5)
    assert one.tpot_s != one.tpot_s


async def test_reasoning_and_content_of_a_chat_are_told_apart() -> None:
    chunks = [
        delta_event(role="assistant", content=""),
        delta_event(reasoning="so"),
        delta_event(reasoning_content=" then"),
        delta_event(content="yes"),
        event(choices=[], usage=USAGE),
        DONE,
    ]
    async with serving(streaming(*chunks)) as client:
        stream = client.chat("tiny", [{"role": "user", "content": "?"}])
        pieces = [piece async for piece in stream]
    assert pieces == [Piece("so", True), Piece(" then", True), Piece("yes")]


async def test_our_own_reply_headers_are_kept_and_others_dropped() -> None:
    handler = streaming(*ANSWER, X_Moe_Serving_Variant="mtp", X_Request_Id="7", Server="x")
    async with serving(handler) as client:
        _, result = await completed(client)
    assert result.headers == {"x-moe-serving-variant": "mtp", "x-request-id": "7"}


async def test_what_was_drafted_and_accepted_is_read_from_the_metrics() -> None:
    last = event(choices=[], usage=USAGE, metrics={"speculative_decoding": SPECULATIVE})
    async with serving(streaming(text_event("a"), last, DONE)) as client:
        _, result = await completed(client)
    assert result.speculation == Speculation(3, 4, 0.75, 2.5, 2, (2, 1))


def test_acceptance_by_place_comes_from_vllms_histogram_of_steps() -> None:
    # 4 steps with 3 drafts each: none, none, one and all three accepted.
    told = SPECULATIVE | {"acceptance_histogram": [2, 1, 0, 1], "num_spec_steps": 4}
    reading = Reading("url")
    assert list(reading.feed(event(metrics={"speculative_decoding": told}) + ENDING)) == []
    speculation = reading.result({}).speculation
    assert speculation is not None
    assert (speculation.drafts, speculation.accepted_per_position) == (4, (2, 1, 1))


def test_what_llama_server_drafted_is_read_from_its_timings() -> None:
    reading = Reading("url")
    timings = {"predicted_n": 13, "draft_n": 16, "draft_n_accepted": 8}
    assert list(reading.feed(event(choices=[], timings=timings) + ENDING)) == []
    # 13 tokens: one from the prompt, 8 accepted, so 4 steps gave one each.
    assert reading.result({}).speculation == Speculation(8, 16, 0.5, 3.0, 4, None)


async def test_times_and_tokens_are_exact_where_chunks_hold_several_tokens() -> None:
    """One clock for both sides, which the server moves once the client has read a chunk."""
    now = 100.0
    read = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal now
        reply = web.StreamResponse()
        await reply.prepare(request)
        for text, at in (("abc", 100.5), ("d", 101.0), ("efgh", 102.0)):
            now = at
            read.clear()
            await reply.write(text_event(text))
            await read.wait()
        now = 102.25
        usage = {"prompt_tokens": 5, "completion_tokens": 8}
        await reply.write(event(choices=[], usage=usage) + DONE)
        return reply

    async with serving(handle, clock=lambda: now) as client:
        stream = client.completion("tiny", "def", max_tokens=8)
        async for _ in stream:
            read.set()
    result = stream.result
    assert (result.ttft_s, result.duration_s) == (0.5, 2.25)
    assert result.tpot_s == 1.75 / 7
    assert (result.chunks, result.completion_tokens, result.text) == (3, 8, "abcdefgh")


def test_ids_and_gaps_of_a_completions_tokens_are_kept() -> None:
    likeliest = [{"token_id:7": -0.5, "token_id:8": -2.0, "token_id:9": -3.0}, {"a": -1.0, "b": -1}]
    choice = {"text": "ab", "token_ids": [7, 1], "logprobs": {"top_logprobs": likeliest}}
    last = {"text": "c", "token_ids": [2], "logprobs": {"top_logprobs": [{"c": -0.25, "d": -1}]}}
    reading = Reading("url")
    for each in (choice, last):
        list(reading.feed(event(choices=[each])))
    list(reading.feed(ENDING))
    result = reading.result({})
    assert (result.token_ids, result.logprob_gaps) == ((7, 1, 2), (1.5, 0.0, 0.75))


def test_ids_and_gaps_of_a_chats_tokens_are_kept_and_a_partial_list_is_dropped() -> None:
    token = {"top_logprobs": [{"logprob": -0.5}, {"logprob": -1.5}]}
    choice = {"delta": {"content": "x"}, "token_ids": [4], "logprobs": {"content": [token] * 3}}
    reading = Reading("url")
    list(reading.feed(event(choices=[choice]) + ENDING))
    result = reading.result({})
    # The usage counts three tokens, so one id cannot be all of them.
    assert (result.token_ids, result.logprob_gaps) == (None, (1.0, 1.0, 1.0))


def test_token_details_are_asked_for_as_each_api_takes_them() -> None:
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    common = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, **ids}
    assert completion_request("tiny", "def", token_details=True, seed=1) == (
        "/completions",
        {**common, "prompt": "def", "logprobs": 2, "seed": 1},
    )
    assert chat_request("tiny", [], token_details=True) == (
        "/chat/completions",
        {**common, "messages": [], "logprobs": True, "top_logprobs": 2},
    )


def test_a_prompt_is_asked_as_what_it_is_with_its_schema() -> None:
    text = Prompt("p", "code", (), 8, text="def")
    assert prompt_request("tiny", text, token_details=True, seed=1) == (
        completion_request("tiny", "def", token_details=True, seed=1)
    )
    schema = {"type": "json_object"}
    chat = Prompt("p", "structured", ({"role": "user", "content": "?"},), 8, None, schema)
    assert prompt_request("tiny", chat) == (
        chat_request("tiny", chat.messages, response_format=schema)
    )


async def test_the_request_asks_for_usage_and_sends_the_key() -> None:
    seen: list[tuple[str, str | None, Any]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        key = request.headers.get("Authorization")
        seen.append((request.path, key, await request.json()))
        return await streaming(*ANSWER)(request)

    async with serving(handle, api_key="sk-1") as client:
        await completed(client)
    body = {
        "model": "tiny",
        "stream": True,
        "stream_options": {"include_usage": True},
        "prompt": "def",
        "max_tokens": 3,
    }
    assert seen == [("/v1/completions", "Bearer sk-1", body)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "no such model", "code": 404}}, "no such model (HTTP 404)"),
        ({"object": "error", "message": "vLLM of old"}, "vLLM of old (HTTP 404)"),
        ("not JSON", "not JSON (HTTP 404)"),
        ("", "Not Found (HTTP 404)"),
    ],
)
async def test_a_refusal_carries_the_servers_message(body: Any, message: str) -> None:
    async with serving(answering(404, body)) as client:
        with pytest.raises(ApiFailureError) as failure:
            await completed(client)
    assert (str(failure.value), failure.value.status) == (message, 404)
    assert failure.value.outcome == "refused"


async def test_an_error_in_the_middle_of_a_stream_is_raised_after_its_pieces() -> None:
    chunks = (text_event("a"), event(error={"message": "the engine died"}), DONE)
    pieces: list[Piece] = []
    async with serving(streaming(*chunks)) as client:
        with pytest.raises(ApiFailureError) as failure:
            async for piece in client.completion("tiny", "def"):
                pieces.append(piece)
    assert pieces == [Piece("a")]
    assert (str(failure.value), failure.value.status) == ("the engine died", None)
    assert failure.value.outcome == "cut"


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ((text_event("a"),), "the stream ended before its end mark: the server broke it off"),
        (
            (text_event("a"), DONE),
            "the server sent no usage, so its tokens cannot be counted",
        ),
    ],
)
async def test_an_incomplete_stream_is_a_failure(chunks: tuple[bytes, ...], message: str) -> None:
    async with serving(streaming(*chunks)) as client:
        with pytest.raises(ApiFailureError) as failure:
            await completed(client)
    assert (str(failure.value), failure.value.outcome) == (message, "cut")


@pytest.mark.parametrize("data", [b"data: {\n\n", b"data: 3\n\n", b"data: \xff\n\n"])
async def test_a_stream_of_something_else_is_a_failure(data: bytes) -> None:
    async with serving(streaming(data, DONE)) as client:
        with pytest.raises(ApiFailureError, match="sent no stream of the OpenAI API") as failure:
            await completed(client)
    assert failure.value.outcome == "cut"


async def test_a_connection_that_breaks_is_a_failure() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        await reply.write(text_event("a"))
        assert request.transport is not None
        request.transport.close()
        return reply

    async with serving(handle) as client:
        with pytest.raises(ApiFailureError, match="broke") as failure:
            await completed(client)
    assert failure.value.outcome == "cut"


async def test_nothing_listening_is_said_plainly() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
        async with Client(url) as client:
            with pytest.raises(ApiFailureError, match=f"nothing answers at {url}/models: "):
                await client.models()
            with pytest.raises(ApiFailureError, match="nothing answers") as failure:
                await completed(client)
    assert failure.value.outcome == "unreachable"


async def test_an_address_that_is_no_url_is_said_plainly() -> None:
    async with Client("localhost") as client:
        with pytest.raises(ApiFailureError, match="localhost/models is no URL; write it as http"):
            await client.models()


async def test_the_result_is_there_only_when_the_stream_was_read() -> None:
    async with serving(streaming(*ANSWER)) as client:
        stream = client.completion("tiny", "def")
        with pytest.raises(RuntimeError, match="has not been read to its end"):
            _ = stream.result


async def test_models_come_in_the_servers_order() -> None:
    body = {"object": "list", "data": [{"id": "b"}, {"id": "a"}]}
    async with serving(answering(200, body)) as client:
        assert await client.models() == ["b", "a"]


async def test_a_list_of_models_of_another_shape_is_a_failure() -> None:
    async with serving(answering(200, {"models": []})) as client:
        with pytest.raises(ApiFailureError, match="sent no list of models"):
            await client.models()


async def test_a_reply_in_one_piece_is_timed_and_its_refusal_raised() -> None:
    async with serving(answering(200, {"choices": []})) as client:
        assert await client.one_reply("tiny", "def", max_tokens=1) > 0
    async with serving(answering(503, {"error": {"message": "loading"}})) as client:
        with pytest.raises(ApiFailureError, match=r"^loading \(HTTP 503\)$"):
            await client.one_reply("tiny", "def", max_tokens=1)


def test_a_long_error_text_is_cut() -> None:
    assert len(error_text({"error": {"message": "x" * 10_000}})) == 2000
