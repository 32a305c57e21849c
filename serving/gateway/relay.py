"""Copies an engine's reply to the client, byte for byte.

Owns the reply's start, the keep-alive comments of a silent stream and how a
stream ends that could not be finished. Until the client has the first part of the body, another
engine may still answer; a comment tells nothing. A stream goes on event by event, as soon
as an event is whole; a client that reads slowly slows the engine's connection down.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from serving.engines.keys import Send
from serving.gateway import errors
from serving.gateway.engine_http import EngineConnectionError, EngineSilentError

EVENT_STREAM = "text/event-stream"
KEEP_ALIVE = b": keep-alive\n\n"
# An error body is read whole; a longer one is no error body.
MAX_ERROR_BYTES = 64 * 1024
# A longer event, as with very many log-probabilities, is passed on as it comes.
MAX_HELD_BYTES = 64 * 1024
# How vLLM 0.32 words it that its engine core is gone; in a stream of /v1/messages its own
# text is left of it, cut short.
_DEATH = (
    b"EngineDead",
    b"EngineCore encountered an issue",
    b"input_value={'error': {'message': 'En",
)
# A model's own text cannot look like these: there, quotation marks are escaped.
_ERROR_EVENT = re.compile(rb'(?:^|(?<=\n\n))(?:data: {"error"|event: error)')
# How a request ends that vLLM gave up because it is shut down. On other paths vLLM repeats parts
# of the request, which may hold such words.
_GIVEN_UP = {
    "/v1/chat/completions": b'"finish_reason":"abort"',
    "/v1/completions": b'"finish_reason":"abort"',
    "/v1/messages": b'"delta":{"stop_reason":null',
}
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number":\s*(\d+)')


class Source(Protocol):
    """A reply as it comes from who makes it; `EngineConnection` has the details."""

    status: int

    @property
    def content_type(self) -> str:
        """The reply's content type."""

    @property
    def content_length(self) -> int | None:
        """The length of the body in bytes, where it was told."""

    async def read(self, within_s: float | None = None) -> bytes:
        """What came of the body; b"" at its end."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How a reply has to come."""

    keep_alive_s: float
    """Silence before a stream's client gets a comment, seconds; 0: none."""
    first_byte_s: float
    """Longest wait for the first part of a stream, seconds."""
    between_s: float
    """Longest wait for any other, seconds."""
    came: Callable[[], None] | None = None
    """Called whenever something of the reply came that does not say that the engine is dead."""


class Reply:
    """One reply on its way to the client; `headers` may grow until it starts."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.headers: list[tuple[bytes, bytes]] = [(b"x-request-id", request_id.encode())]
        self.started = False
        self.told = False
        """Whether the client has some of the body; a comment is none."""
        self.streaming = False
        self.finished = False
        self._last = b"\n\n"
        # Begun and ended ones, so it is odd while one is under way.
        self._writes = 0
        self._commenting = asyncio.Lock()

    async def start(self, status: int, content_type: bytes, length: int | None = None) -> None:
        """Send status and headers; `length` None means a body of unknown length.

        Where a comment has been sent, both are out.
        """
        if self.started:
            return
        self.started = True
        headers = [*self.headers, (b"content-type", content_type)]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, chunk: bytes, *, more: bool = True) -> None:
        """Send a part of the body; returns when the connection takes more."""
        self.finished = not more
        self.told = True
        self._writes += 1
        if self._commenting.locked():
            async with self._commenting:
                pass
        await self._send({"type": "http.response.body", "body": chunk, "more_body": more})
        self._writes += 1
        self._last = chunk

    async def keep_alive(self, every_s: float) -> None:
        """Send an SSE comment whenever nothing was written for `every_s`; never returns."""
        while True:
            before = self._writes
            await asyncio.sleep(every_s)
            # Inside an event, or past a write that waits, a comment would break the event.
            if self._writes == before and before % 2 == 0 and self._between_events():
                await self.comment()

    async def comment(self) -> None:
        """Send an SSE comment."""
        async with self._commenting:
            await self._send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})

    async def body(self, status: int, content_type: bytes, body: bytes) -> None:
        """Send a whole reply."""
        await self.start(status, content_type, len(body))
        await self.write(body, more=False)

    async def json(self, status: int, value: dict[str, Any]) -> None:
        """Send a whole reply as JSON."""
        await self.body(status, b"application/json", json.dumps(value).encode())

    async def fail(self, error: errors.ApiError, path: str) -> None:
        """Tell the client what went wrong: as a reply, or as the last event of a stream.

        A reply that has started and is no stream is left unfinished, so that the
        client sees a broken connection and no success.
        """
        if not self.started:
            self.headers += error.headers
            await self.json(error.status, error.body(path))
        elif self.streaming and not self.finished:
            numbers = _SEQUENCE_NUMBER.findall(self._last)
            event = error.sse_event(path, int(numbers[-1]) + 1 if numbers else 0)
            await self.write(event if self._between_events() else b"\n\n" + event, more=False)

    def _between_events(self) -> bool:
        return self._last.endswith(_EVENT_ENDS)


async def relay(source: Source, reply: Reply, path: str, model: str, pace: Pace) -> str:
    """Copy a reply to the client and return the outcome: its status, `cut` or `stalled`.

    Raises ApiError where the client was told nothing yet.
    """
    if source.status in (404, 405, 500, 502, 503):
        await _translated(source, path, model, reply, pace)
        return str(source.status)
    streaming = source.content_type.startswith(EVENT_STREAM)
    if reply.started and not (streaming and source.status == 200):
        raise errors.engine_failed(model)
    reply.streaming = streaming
    first = await _first(source, reply, path, model, pace)
    length = None if reply.streaming else source.content_length
    await reply.start(source.status, source.content_type.encode("latin-1"), length)
    try:
        problem = await _copy(source, reply, first, path, model, pace)
    except EngineSilentError as silent:
        problem = errors.engine_silent(model, silent.limit_s)
    except EngineConnectionError:
        problem = errors.engine_died(model)
    if problem is not None:
        if not reply.told:
            raise problem
        await reply.fail(problem, path)
        return "stalled" if problem.code == errors.SILENT else "cut"
    await reply.write(b"", more=False)
    return str(source.status)


async def _first(source: Source, reply: Reply, path: str, model: str, pace: Pace) -> bytes | None:
    """The first part of the body; None where a stream's client has to be told that it waits.

    Raises ApiError where it is no answer.
    """
    if not reply.streaming:
        first = await source.read()
    else:
        try:
            async with asyncio.timeout(pace.keep_alive_s or None):
                first = await source.read(pace.first_byte_s)
        except EngineSilentError as silent:
            raise errors.engine_silent(model, silent.limit_s) from None
        except TimeoutError:
            return None
    if _end_of_life(first, path) is not None:
        raise errors.engine_died(model)
    if pace.came is not None:
        pace.came()
    return first


async def _copy(
    source: Source, reply: Reply, first: bytes | None, path: str, model: str, pace: Pace
) -> errors.ApiError | None:
    """Copy the body, which begins with `first`; returns what is wrong with its end.

    Raises EngineConnectionError.
    """
    between_s = pace.between_s if reply.streaming else None
    keep_alive = None
    if reply.streaming and pace.keep_alive_s > 0:
        keep_alive = asyncio.create_task(reply.keep_alive(pace.keep_alive_s))
    try:
        chunk, held = first, b""
        if chunk is None:
            await reply.comment()
            chunk = await source.read(pace.first_byte_s - pace.keep_alive_s)
        while chunk:
            if held:
                chunk, held = held + chunk, b""
            if reply.streaming and not chunk.endswith(_EVENT_ENDS):
                chunk, held = _whole_events(chunk)
            end = _end_of_life(chunk, path)
            if end is not None:
                if end:
                    await reply.write(chunk[:end])
                return errors.engine_died(model)
            if pace.came is not None:
                pace.came()
            if chunk:
                await reply.write(chunk)
            chunk = await source.read(between_s)
        if held:
            await reply.write(held)
        return None
    finally:
        if keep_alive is not None:
            keep_alive.cancel()
            with suppress(asyncio.CancelledError):
                await keep_alive


def _whole_events(chunk: bytes) -> tuple[bytes, bytes]:
    """The events of `chunk` that are complete, and the beginning of the next one."""
    end = max((chunk.rfind(mark) + len(mark) for mark in _EVENT_ENDS if mark in chunk), default=0)
    if len(chunk) - end > MAX_HELD_BYTES:
        return chunk, b""
    return chunk[:end], chunk[end:]


def _end_of_life(events: bytes, path: str) -> int | None:
    """Where the event begins that says that the engine gave the request up; None without one."""
    if b"error" in events and _died(events) and (found := _ERROR_EVENT.search(events)):
        return found.start()
    mark = _GIVEN_UP.get(path)
    if mark is not None and mark in events:
        before, separator, _ = events.partition(mark)[0].rpartition(b"\n\n")
        return len(before) + len(separator)
    return None


def _died(error: bytes) -> bool:
    """Whether an error of vLLM's says that its engine core is gone."""
    return any(words in error for words in _DEATH)


async def _translated(engine: Source, path: str, model: str, reply: Reply, pace: Pace) -> None:
    """Give an engine's bare refusals a shape; vLLM's own error objects pass unchanged."""
    body = b""
    while chunk := await engine.read():
        body += chunk
        if len(body) > MAX_ERROR_BYTES:
            raise errors.engine_died(model)
    # A 404 repeats what the client asked for, whose words may be any.
    if engine.status in (502, 503) or (engine.status == 500 and _died(body)):
        raise errors.engine_died(model)
    if pace.came is not None:
        pace.came()
    if b'"error"' not in body:
        raise (
            errors.engine_failed(model) if engine.status == 500 else errors.not_offered(model, path)
        )
    if reply.started:
        raise errors.engine_failed(model)
    await reply.body(engine.status, engine.content_type.encode("latin-1"), body)
