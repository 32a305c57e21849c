"""Streams: every byte as the engine sent it, never silent for long, and an end that is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anthropic
import httpx
import openai
import pytest

from serving.engines.keys import Send
from serving.gateway import errors
from serving.gateway.relay import MAX_HELD_BYTES
from tests.unit.gateway.harness import (
    COMPLETIONS,
    MODEL,
    PATIENCE_S,
    Behaviour,
    Stack,
    events,
    start,
    whole,
    write,
)

FIRST, SECOND, DONE = b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n"
DIED = "the engine of tiny-moe stopped before the reply was complete"


class Cut(Exception):
    """The engine's connection breaks."""


def held_after(*parts: bytes, release: asyncio.Event) -> Behaviour:
    """An engine that streams these parts, then waits, then ends."""

    async def behave(send: Send) -> None:
        await start(send, "text/event-stream")
        for part in parts:
            await write(send, part)
        await release.wait()
        await write(send, DONE, more=False)

    return behave


@asynccontextmanager
async def open_stream(stack: Stack, path: str = COMPLETIONS) -> AsyncIterator[httpx.Response]:
    body = {"model": MODEL, "stream": True}
    async with stack.client.stream("POST", path, json=body) as response:
        yield response


async def test_a_stream_is_relayed_byte_for_byte(stack: Stack) -> None:
    parts = [FIRST, b": comment\r\n\r\n", b"data: caf\xc3", b"\xa9\n\n", SECOND + SECOND, DONE]
    stack.engine.behave = events(*parts)
    response = await stack.ask(stream=True)
    assert response.content == b"".join(parts)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (response.headers["transfer-encoding"], stack.pool.held) == ("chunked", 0)


async def test_a_whole_reply_is_relayed_byte_for_byte(stack: Stack) -> None:
    body = bytes(range(256)) * 4096
    stack.engine.behave = whole(body, "application/octet-stream")
    response = await stack.ask()
    assert response.content == body
    assert response.headers["content-length"] == str(len(body))
    assert response.headers["content-type"] == "application/octet-stream"


async def test_each_event_arrives_before_the_next_is_made(stack: Stack) -> None:
    release = asyncio.Event()
    stack.engine.behave = held_after(FIRST, release=release)
    async with open_stream(stack) as response:
        received = response.aiter_raw()
        assert await anext(received) == FIRST
        release.set()
        assert await anext(received) == DONE


async def test_a_silent_stream_carries_comments(stack: Stack) -> None:
    stack.use(keep_alive_s=0.01)
    release = asyncio.Event()
    stack.engine.behave = held_after(release=release)
    async with open_stream(stack) as response:
        received = response.aiter_raw()
        assert await anext(received) == b": keep-alive\n\n"
        assert await anext(received) == b": keep-alive\n\n"
        release.set()
        rest = b"".join([part async for part in received])
    assert rest.replace(b": keep-alive\n\n", b"") == DONE


async def test_half_an_event_waits_for_the_rest_and_no_comment_parts_them(stack: Stack) -> None:
    stack.use(keep_alive_s=0.01)
    release = asyncio.Event()
    stack.engine.behave = held_after(FIRST + b"data: {", b'"n": 2}\n', release=release)
    async with open_stream(stack) as response:
        received = response.aiter_raw()
        assert await anext(received) == FIRST
        assert await anext(received) == b": keep-alive\n\n"
        release.set()
        rest = b"".join([part async for part in received])
    assert rest.replace(b": keep-alive\n\n", b"") == SECOND[:-1] + DONE


async def test_an_event_too_long_to_be_held_is_passed_on_without_comments(stack: Stack) -> None:
    stack.use(keep_alive_s=0.01)
    release, half = asyncio.Event(), b"data: " + b"x" * MAX_HELD_BYTES
    stack.engine.behave = held_after(half, release=release)
    async with open_stream(stack) as response:
        received, seen = response.aiter_raw(), b""
        while len(seen) < len(half):
            seen += await anext(received)
        await asyncio.sleep(0.1)
        release.set()
        assert seen + b"".join([part async for part in received]) == half + DONE


async def test_no_comment_is_sent_where_the_setting_turns_it_off(stack: Stack) -> None:
    stack.use(keep_alive_s=0)
    release = asyncio.Event()
    stack.engine.behave = held_after(FIRST, release=release)
    async with open_stream(stack) as response:
        received = response.aiter_raw()
        assert await anext(received) == FIRST
        await asyncio.sleep(0.05)
        release.set()
        assert b"".join([part async for part in received]) == DONE


DEAD = b'data: {"error": {"message": "EngineCore encountered an issue.", "code": 500}}\n\n'
# What vLLM 0.32 makes of that error in a stream of /v1/messages.
DEAD_MESSAGES = (
    b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":'
    b'"2 validation errors for ChatCompletionStreamResponse\\nmodel\\n  Field required '
    b"[type=missing, input_value={'error': {'message': 'En...am': None, 'code': 500}}, "
    b'input_type=dict]"}}\n\n'
)
# The last words to a request when vLLM is shut down.
ABORTED = b'data: {"choices":[{"index":0,"text":"","finish_reason":"abort"}]}\n\n'
ABORTED_CHAT = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n'
ABORTED_MESSAGES = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":null,'
    b'"stop_sequence":null}}\n\n'
)
STOP_MESSAGES = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
CREATED = b'event: response.created\ndata: {"type": "response.created", "sequence_number": 7}\n\n'
ENDS = {
    "error": (COMPLETIONS, DEAD, DONE),
    "error of a chat": ("/v1/chat/completions", DEAD, DONE),
    "error of messages": ("/v1/messages", DEAD_MESSAGES, b""),
    "abort": (COMPLETIONS, ABORTED, DONE),
    "abort of a chat": ("/v1/chat/completions", ABORTED_CHAT, DONE),
    "abort of messages": ("/v1/messages", ABORTED_MESSAGES, STOP_MESSAGES),
}


@pytest.mark.parametrize("together", [True, False], ids=["in one read", "in several"])
@pytest.mark.parametrize(("path", "death", "done"), ENDS.values(), ids=ENDS)
async def test_vllms_own_word_of_a_dead_engine_core_is_the_streams_end(
    stack: Stack, path: str, death: bytes, done: bytes, together: bool
) -> None:
    half = len(death) // 2
    release = asyncio.Event()

    async def behave(send: Send) -> None:
        await start(send, "text/event-stream")
        await write(send, FIRST)
        await release.wait()
        for part in (death + done,) if together else (death[:half], death[half:] + done):
            await write(send, part)
        await write(send, b"", more=False)

    stack.engine.behave = behave
    body = {"model": MODEL, "prompt": "a", "stream": True}
    async with stack.client.stream("POST", path, json=body) as response:
        parts = response.aiter_raw()
        assert await anext(parts) == FIRST
        release.set()
        last = b"".join([part async for part in parts])
    assert json.loads(last.removeprefix(b"event: error\n").removeprefix(b"data: ")) == (
        errors.engine_died(MODEL).body(path)
    )
    assert 'outcome="cut"' in await stack.metrics()


@pytest.mark.parametrize(("path", "death", "done"), ENDS.values(), ids=ENDS)
async def test_a_stream_that_dies_before_the_client_has_any_of_it_is_503(
    stack: Stack, path: str, death: bytes, done: bytes
) -> None:
    stack.engine.behave = events(FIRST + death + done)
    response = await stack.ask(path, stream=True)
    assert (response.status_code, response.json()) == (503, errors.engine_died(MODEL).body(path))


async def test_an_error_of_one_request_is_passed_on_as_it_is(stack: Stack) -> None:
    error = b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n'
    stack.engine.behave = events(FIRST, error, DONE)
    assert (await stack.ask(stream=True)).content == FIRST + error + DONE


async def test_a_whole_reply_that_the_engine_gave_up_is_503(stack: Stack) -> None:
    stack.engine.behave = whole(b'{"choices":[{"text":"half","finish_reason":"abort"}]}')
    response = await stack.ask()
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert response.json()["error"]["message"] == DIED


async def test_text_about_a_dead_engine_core_is_text(stack: Stack) -> None:
    texts = (
        b'data: {"choices": [{"text": "{\\"error\\": EngineCore encountered an issue"}]}\n\n',
        b'data: {"choices": [{"text": "\\"finish_reason\\":\\"abort\\""}]}\n\n',
    )
    stack.engine.behave = events(*texts, DONE)
    assert (await stack.ask(stream=True)).content == b"".join(texts) + DONE


async def test_a_stream_cut_by_the_engine_ends_with_an_error_event(stack: Stack) -> None:
    stack.engine.behave = events(FIRST, then=Cut())
    response = await stack.ask(stream=True)
    assert response.content.startswith(FIRST + b"data: {")
    assert json.loads(response.content.removeprefix(FIRST + b"data: ")) == {
        "error": {
            "message": DIED,
            "type": "server_error",
            "param": None,
            "code": "engine_died",
        }
    }
    assert 'outcome="cut"' in await stack.metrics()
    assert stack.pool.held == 0


async def test_of_an_event_that_was_cut_nothing_is_passed_on(stack: Stack) -> None:
    stack.engine.behave = events(FIRST, b"data: {", then=Cut())
    response = await stack.ask(stream=True)
    assert response.content.startswith(FIRST + b'data: {"error"')


async def test_a_long_event_that_was_cut_is_closed_before_the_error(stack: Stack) -> None:
    half = b"data: " + b"x" * MAX_HELD_BYTES
    stack.engine.behave = events(half, then=Cut())
    response = await stack.ask(stream=True)
    assert response.content.startswith(half + b'\n\ndata: {"error"')


async def test_a_cut_stream_of_messages_ends_in_anthropics_shape(stack: Stack) -> None:
    stack.engine.behave = events(PING, then=Cut())
    response = await stack.ask("/v1/messages", stream=True)
    head = PING + b"event: error\ndata: "
    assert response.content.startswith(head)
    assert json.loads(response.content.removeprefix(head)) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": DIED},
    }


async def test_a_cut_stream_of_responses_goes_on_counting_its_events(stack: Stack) -> None:
    stack.engine.behave = events(CREATED, then=Cut())
    response = await stack.ask("/v1/responses", stream=True)
    head = CREATED + b"event: error\ndata: "
    assert response.content.startswith(head)
    assert json.loads(response.content.removeprefix(head)) == {
        "type": "error",
        "code": "engine_died",
        "message": DIED,
        "param": None,
        "sequence_number": 8,
    }


async def test_the_openai_client_raises_the_error_of_a_cut_stream(stack: Stack) -> None:
    stack.engine.behave = events(b'data: {"choices": []}\n\n', then=Cut())
    async with openai.AsyncOpenAI(
        base_url=f"{stack.client.base_url}/v1", api_key="none", max_retries=0
    ) as client:
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
        with pytest.raises(openai.APIError, match=DIED):
            async for _ in stream:
                pass


async def test_the_openai_client_reads_the_error_of_a_cut_response(stack: Stack) -> None:
    stack.engine.behave = events(CREATED, then=Cut())
    async with openai.AsyncOpenAI(
        base_url=f"{stack.client.base_url}/v1", api_key="none", max_retries=0
    ) as client:
        stream = await client.responses.create(model=MODEL, input="a", stream=True)
        _, last = [event async for event in stream]
    assert last.type == "error" and last.message == DIED


async def test_the_anthropic_client_raises_the_error_of_a_cut_stream(stack: Stack) -> None:
    stack.engine.behave = events(PING, then=Cut())
    async with anthropic.AsyncAnthropic(
        base_url=str(stack.client.base_url), api_key="none", max_retries=0
    ) as client:
        stream = await client.messages.create(
            model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "a"}], stream=True
        )
        with pytest.raises(anthropic.APIStatusError, match=DIED):
            async for _ in stream:
                pass


async def test_a_stream_over_the_time_limit_ends_with_an_error_event(stack: Stack) -> None:
    stack.use(request_timeout_s=1)
    stack.engine.behave = held_after(FIRST, release=asyncio.Event())
    response = await stack.ask(stream=True)
    assert response.content.startswith(FIRST)
    assert b'"code": "timeout"' in response.content
    await asyncio.wait_for(stack.engine.gone.wait(), PATIENCE_S)
    assert stack.pool.held == 0


async def test_an_engine_that_goes_between_head_and_body_is_503(stack: Stack) -> None:
    async def behave(send: Send) -> None:
        await start(send, "application/json", length=100)
        raise Cut

    stack.engine.behave = behave
    response = await stack.ask()
    assert (response.status_code, response.json()["error"]["message"]) == (503, DIED)


async def test_a_reply_that_is_no_stream_and_is_cut_is_no_success(stack: Stack) -> None:
    async def behave(send: Send) -> None:
        await start(send, "application/json", length=100)
        await write(send, b'{"id":')
        raise Cut

    stack.engine.behave = behave
    with pytest.raises(httpx.RemoteProtocolError):
        await stack.ask()
    assert stack.pool.held == 0


async def test_an_engine_that_hangs_up_before_its_reply_is_503(stack: Stack) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    stack.pool.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    response = await stack.ask()
    server.close()
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert response.json()["error"]["message"] == DIED


async def test_a_client_that_leaves_while_it_waits_for_a_lease_gives_it_up(stack: Stack) -> None:
    stack.pool.free.clear()
    waiting = asyncio.create_task(stack.ask())
    await stack.pool.asked.wait()
    waiting.cancel()
    await asyncio.wait_for(stack.pool.released.wait(), PATIENCE_S)
    assert (stack.pool.held, stack.engine.paths) == (0, [])


async def test_a_client_that_leaves_before_the_first_byte_frees_lease_and_engine(
    stack: Stack,
) -> None:
    async def behave(send: Send) -> None:
        del send
        await asyncio.Event().wait()

    stack.engine.behave = behave
    waiting = asyncio.create_task(stack.ask())
    await stack.engine.busy.wait()
    waiting.cancel()
    await asyncio.wait_for(stack.engine.gone.wait(), PATIENCE_S)
    await asyncio.wait_for(stack.pool.released.wait(), PATIENCE_S)
    assert stack.pool.held == 0
    assert 'outcome="disconnect"' in await stack.metrics()


async def test_a_client_that_leaves_in_mid_stream_frees_lease_and_engine(stack: Stack) -> None:
    stack.engine.behave = held_after(FIRST, release=asyncio.Event())
    async with open_stream(stack) as response:
        assert await anext(response.aiter_raw()) == FIRST
    await asyncio.wait_for(stack.engine.gone.wait(), PATIENCE_S)
    await asyncio.wait_for(stack.pool.released.wait(), PATIENCE_S)
    assert stack.pool.held == 0
    assert 'outcome="disconnect"' in await stack.metrics()


async def test_a_slow_client_slows_the_engine(stack: Stack) -> None:
    part, count = b"x" * 2**20, 64
    made = 0

    async def behave(send: Send) -> None:
        nonlocal made
        await start(send, "text/event-stream")
        for _ in range(count):
            await write(send, part)
            made += 1
        await write(send, b"", more=False)

    stack.engine.behave = behave
    async with open_stream(stack) as response:
        chunks = response.aiter_raw()
        received = len(await anext(chunks))
        seen = 0
        while seen != made:
            seen = made
            await asyncio.sleep(0.2)
        # What the sockets' own buffers take, and no more, is made ahead of the client.
        assert made < count // 2
        async for chunk in chunks:
            received += len(chunk)
    assert (received, made) == (count * len(part), count)


@pytest.mark.parametrize("streamed", [True, False])
async def test_what_a_response_repeats_of_its_request_is_no_death(
    stack: Stack, streamed: bool
) -> None:
    body = b'{"type":"response.created","metadata":{"finish_reason":"abort"},"sequence_number":0}'
    event = b"event: response.created\ndata: " + body + b"\n\n"
    stack.engine.behave = events(event) if streamed else whole(body)
    response = await stack.ask("/v1/responses", stream=streamed)
    assert (response.status_code, response.content) == (200, event if streamed else body)
    assert stack.pool.leased == ["engine-mtp"]


async def test_what_a_404_repeats_of_its_request_is_no_death(stack: Stack) -> None:
    body = b'{"error": {"message": "Response with id \'EngineDead\' not found."}}'
    stack.engine.behave = whole(body, status=404)
    response = await stack.ask("/v1/responses", previous_response_id="EngineDead")
    assert (response.status_code, response.content) == (404, body)
    assert stack.pool.leased == ["engine-mtp"]
