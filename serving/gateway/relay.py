"""Copies an engine's reply to the client, byte for byte.

Owns the reply's start, the keep-alive comments of a silent stream and how a
stream ends that could not be finished. Nothing is buffered: a client that reads
slowly slows the engine's connection down.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from math import ceil
from typing import Any

import aiohttp

from serving.engines.keys import Send
from serving.gateway import errors

EVENT_STREAM = "text/event-stream"
KEEP_ALIVE = b": keep-alive\n\n"
# An error body is read whole; a longer one is no error body.
MAX_ERROR_BYTES = 64 * 1024


class Reply:
    """One reply on its way to the client; `headers` may grow until it starts."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.headers: list[tuple[bytes, bytes]] = [(b"x-request-id", request_id.encode())]
        self.started = False
        self.streaming = False
        self.finished = False

    async def start(self, status: int, content_type: bytes, length: int | None = None) -> None:
        """Send status and headers; `length` None means a body of unknown length."""
        self.started = True
        headers = [*self.headers, (b"content-type", content_type)]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, chunk: bytes, *, more: bool = True) -> None:
        """Send a part of the body."""
        self.finished = not more
        await self._send({"type": "http.response.body", "body": chunk, "more_body": more})

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
            if error.retry_after_s is not None:
                self.headers.append((b"retry-after", str(ceil(error.retry_after_s)).encode()))
            await self.json(error.status, error.body(path))
        elif self.streaming and not self.finished:
            await self.write(error.sse_event(path), more=False)


async def relay(
    response: aiohttp.ClientResponse, reply: Reply, path: str, model: str, keep_alive_s: float
) -> str:
    """Copy `response` to the client and return the outcome: its status, or `cut`."""
    content_type = response.headers.get("content-type", "application/json")
    if response.status in (404, 405, 500, 502, 503):
        await _translated(response, path, model, reply, content_type)
        return str(response.status)
    reply.streaming = content_type.startswith(EVENT_STREAM)
    length = response.content_length if not reply.streaming else None
    await reply.start(response.status, content_type.encode("latin-1"), length)
    stream = _Stream(reply)
    keep_alive = None
    if reply.streaming and keep_alive_s > 0:
        keep_alive = asyncio.create_task(stream.keep_alive(keep_alive_s))
    try:
        async for chunk in response.content.iter_any():
            await stream.write(chunk)
    except aiohttp.ClientError:
        await reply.fail(errors.engine_died(model), path)
        return "cut"
    finally:
        if keep_alive is not None:
            keep_alive.cancel()
            with suppress(asyncio.CancelledError):
                await keep_alive
    await reply.write(b"", more=False)
    return str(response.status)


class _Stream:
    """An event stream that is never silent for long, nor broken inside an event."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._between_events = True
        self._written = 0

    async def write(self, chunk: bytes) -> None:
        self._between_events = False
        await self._reply.write(chunk)
        self._written += 1
        self._between_events = chunk.endswith(b"\n\n")

    async def keep_alive(self, every_s: float) -> None:
        seen = -1
        while True:
            await asyncio.sleep(every_s)
            if self._written == seen and self._between_events:
                await self._reply.write(KEEP_ALIVE)
            seen = self._written


async def _translated(
    response: aiohttp.ClientResponse, path: str, model: str, reply: Reply, content_type: str
) -> None:
    """Give an engine's bare refusals a shape; vLLM's own error objects pass unchanged."""
    body = await response.content.read(MAX_ERROR_BYTES)
    if b"EngineDead" in body or response.status in (502, 503):
        raise errors.engine_died(model)
    if response.status in (404, 405) and b'"error"' not in body:
        raise errors.not_offered(model, path)
    await reply.body(response.status, content_type.encode("latin-1"), body)
