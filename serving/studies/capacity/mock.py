"""A mock engine: `python -m serving.studies.capacity.mock PORT SOCKET`.

Owns an HTTP/1.1 server that answers chat requests as vLLM does, on a loopback port and on a
unix socket, without an engine: every event is one HTTP chunk and one write, the reply is made
up beforehand. It takes a few µs per event, so that what stands before it is what is measured.
SIGTERM ends it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import cache
from typing import cast

import httptools
import uvloop

from serving.studies.capacity import wire
from serving.studies.capacity.wire import Asked

_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_MODELS = json.dumps(
    {"object": "list", "data": [{"id": wire.MODEL, "object": "model", "owned_by": "mock"}]}
).encode()


def main() -> None:
    """Serve until SIGTERM."""
    uvloop.run(serve(int(sys.argv[1]), sys.argv[2]))


async def serve(port: int, socket: str) -> None:
    """Serve on this loopback port and this unix socket; never returns."""
    loop = asyncio.get_running_loop()
    # A burst of 64 new connections must not wait for SYNs that are sent again.
    tcp = await loop.create_server(MockConnection, "127.0.0.1", port, backlog=1024)
    unix = await loop.create_unix_server(MockConnection, socket, backlog=1024)
    await asyncio.gather(tcp.serve_forever(), unix.serve_forever())


class MockConnection(asyncio.Protocol):
    """One connection: one request at a time, answered as it asks."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._body = bytearray()
        self._url = b""
        self._due: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse; what is no HTTP closes the connection."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the reply that is under way."""
        if self._due is not None:
            self._due.cancel()

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._body.clear()
        self._url = b""

    def on_url(self, url: bytes) -> None:
        """Keep the target."""
        self._url += url

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body."""
        self._body += body

    def on_message_complete(self) -> None:
        """Answer."""
        if self._url != wire.PATH.encode():
            found = {b"/health": b"", b"/v1/models": _MODELS}.get(self._url)
            self._transport.write(_whole(404 if found is None else 200, found or b""))
            return
        asked = wire.read_request(bytes(self._body))
        if not asked.stream:
            self._transport.write(_whole_chat(asked.chunks))
            return
        self._transport.write(_STREAM_HEAD)
        self._send(asked, 1, self._loop.time())

    def _send(self, asked: Asked, number: int, began: float) -> None:
        """Write event `number` of the stream, and see to it that the next one comes."""
        if number > asked.chunks:
            self._transport.write(_END)
            return
        self._transport.write(_LAST if number == asked.chunks else _EVENT)
        if asked.pause_ms and number < asked.chunks:
            # By the stream's own beginning, so that a late event delays no other.
            due = began + number * asked.pause_ms / 1e3
            self._due = self._loop.call_at(due, self._send, asked, number + 1, began)
        else:
            self._due = self._loop.call_soon(self._send, asked, number + 1, began)


@cache
def _whole_chat(chunks: int) -> bytes:
    return _whole(200, wire.whole_reply(chunks))


def _whole(status: int, body: bytes) -> bytes:
    reason = {200: "OK", 404: "Not Found"}[status]
    head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def _http_chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


_EVENT = _http_chunk(wire.event())
_LAST = _http_chunk(wire.event(last=True))
_END = _http_chunk(wire.DONE) + _http_chunk(b"")


if __name__ == "__main__":
    main()
