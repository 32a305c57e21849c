"""The client against a real HTTP server on loopback."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from serving.studies.client import ApiFailureError, Client, Piece, Result, Speculation, error_text

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
SPECULATIVE = {
    "mean_acceptance_length": 2.5,
    "draft_acceptance_rate": 0.75,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 4,
}


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text_event(text: str, finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish_reason}])


def delta_event(**delta: str) -> bytes:
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": None}])


DONE = b"data: [DONE]\n\n"
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
async def serving(handler: Handler, api_key: str | None = None) -> AsyncIterator[Client]:
    """A client of a server that answers everything with `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with Client(f"http://127.0.0.1:{port}/v1/", api_key=api_key) as client:
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
    assert result.speculation == Speculation(3, 4, 0.75, 2.5)


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


async def test_an_error_in_the_middle_of_a_stream_is_raised_after_its_pieces() -> None:
    chunks = (text_event("a"), event(error={"message": "the engine died"}), DONE)
    pieces: list[Piece] = []
    async with serving(streaming(*chunks)) as client:
        with pytest.raises(ApiFailureError) as failure:
            async for piece in client.completion("tiny", "def"):
                pieces.append(piece)
    assert pieces == [Piece("a")]
    assert (str(failure.value), failure.value.status) == ("the engine died", None)


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
    assert str(failure.value) == message


@pytest.mark.parametrize("data", [b"data: {\n\n", b"data: 3\n\n", b"data: \xff\n\n"])
async def test_a_stream_of_something_else_is_a_failure(data: bytes) -> None:
    async with serving(streaming(data, DONE)) as client:
        with pytest.raises(ApiFailureError, match="sent no stream of the OpenAI API"):
            await completed(client)


async def test_a_connection_that_breaks_is_a_failure() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        await reply.write(text_event("a"))
        assert request.transport is not None
        request.transport.close()
        return reply

    async with serving(handle) as client:
        with pytest.raises(ApiFailureError, match="broke"):
            await completed(client)


async def test_nothing_listening_is_said_plainly() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
        async with Client(url) as client:
            with pytest.raises(ApiFailureError, match=f"nothing answers at {url}/models: "):
                await client.models()


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
