"""Copies an engine's reply to the client, byte for byte.

Owns the reply's start, the keep-alive comments of a silent stream and how a
stream ends that could not be finished. Nothing is buffered: a client that reads
slowly slows the engine's connection down.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from typing import Any

import aiohttp

from serving.engines.keys import Send
from serving.gateway import errors

EVENT_STREAM = "text/event-stream"
KEEP_ALIVE = b": keep-alive\n\n"
# An error body is read whole; a longer one is no error body.
MAX_ERROR_BYTES = 64 * 1024
# A model's own text cannot look so: there, quotation marks are escaped.
_ERROR_EVENT = re.compile(rb'(?:^|(?<=\n\n))(?:data: {"error"|event: error)')
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number":\s*(\d+)')


class Reply:
    """One reply on its way to the client; `headers` may grow until it starts."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.headers: list[tuple[bytes, bytes]] = []
        self.started = False
        self.streaming = False
        self.finished = False
        self._last = b"\n\n"
        self._writing = asyncio.Lock()

    async def start(self, status: int, content_type: bytes, length: int | None = None) -> None:
        """Send status and headers; `length` None means a body of unknown length."""
        self.started = True
        headers = [*self.headers, (b"content-type", content_type)]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, chunk: bytes, *, more: bool = True) -> None:
        """Send a part of the body; returns when the connection takes more."""
        self.finished = not more
        async with self._writing:
            await self._send({"type": "http.response.body", "body": chunk, "more_body": more})
            self._last = chunk

    async def keep_alive(self, every_s: float) -> None:
        """Send an SSE comment whenever nothing was written for `every_s`; never returns."""
        while True:
            before = self._last
            await asyncio.sleep(every_s)
            # Inside an event, or past a write that waits, a comment would break the event.
            if self._last is before and self._between_events() and not self._writing.locked():
                async with self._writing:
                    message = {"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True}
                    await self._send(message)

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
        return self._last.endswith(b"\n\n")


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
    keep_alive = None
    if reply.streaming and keep_alive_s > 0:
        keep_alive = asyncio.create_task(reply.keep_alive(keep_alive_s))
    cut = False
    try:
        async for chunk in response.content.iter_any():
            # vLLM ends such a stream as if it were whole, with its own end mark.
            death = _ERROR_EVENT.search(chunk) if _died(chunk) else None
            if death:
                if before := chunk[: death.start()]:
                    await reply.write(before)
                cut = True
                break
            await reply.write(chunk)
    except aiohttp.ClientError:
        cut = True
    finally:
        if keep_alive is not None:
            keep_alive.cancel()
            with suppress(asyncio.CancelledError):
                await keep_alive
    if cut:
        await reply.fail(errors.engine_died(model), path)
        return "cut"
    await reply.write(b"", more=False)
    return str(response.status)


def _died(error: bytes) -> bool:
    """Whether an error of vLLM's says that its engine core is gone."""
    return b"EngineDead" in error or b"EngineCore encountered an issue" in error


async def _translated(
    response: aiohttp.ClientResponse, path: str, model: str, reply: Reply, content_type: str
) -> None:
    """Give an engine's bare refusals a shape; vLLM's own error objects pass unchanged."""
    body = b""
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_ERROR_BYTES:
            raise errors.engine_died(model)
    if _died(body) or response.status in (502, 503):
        raise errors.engine_died(model)
    if b'"error"' not in body:
        raise (
            errors.engine_failed(model)
            if response.status == 500
            else errors.not_offered(model, path)
        )
    await reply.body(response.status, content_type.encode("latin-1"), body)
