"""The load: `python -m serving.studies.capacity.client SETTINGS`.

SETTINGS is a `LoadSettings` as JSON. Owns the connections, each of which sends its next request
when the last is answered, and what is measured of them. A program of its own, so that its CPU
time is nobody else's. On stdout it says `begin` and `end` when the measured window does, so that
its parent reads CPU times then, and last a `Load` as JSON. A reply that is an error or not
complete ends it, with a line on stderr and status 1: a comparison with failures is none.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
import sys
import time
from collections.abc import Sequence
from typing import cast
from urllib.parse import urlsplit

import httptools
import uvloop
from pydantic import BaseModel, ConfigDict

from serving.studies.capacity import wire
from serving.studies.capacity.wire import Asked

# A slow target gets so long for as many requests as there are connections.
SLOW_WITHIN_S = 20.0
LOOK_EVERY_S = 0.05
MOST_OF_AN_ERROR = 300


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LoadSettings(_Value):
    """What is asked of whom. Times in seconds."""

    url: str
    """Scheme, host and port."""
    connections: int
    chunks: int
    pause_ms: int
    stream: bool
    warm_up_s: float
    seconds: float
    seed: int


class Latency(_Value):
    """Two percentiles over requests, milliseconds."""

    p50_ms: float
    p99_ms: float


class Load(_Value):
    """What came in the window."""

    seconds: float
    requests: int
    chunks: int
    """Events of streams, `[DONE]` included, whether or not their request ended in the window."""
    ttfb: Latency
    """From sending to the first byte of the body, of the requests that ended in the window."""
    total: Latency
    """From sending to the end of the body."""
    client_cpu_s: float


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; needs one."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def latency(seconds: Sequence[float]) -> Latency:
    """Median and 99th percentile."""
    return Latency(
        p50_ms=1e3 * percentile(seconds, 0.5),
        p99_ms=1e3 * percentile(seconds, 0.99),
    )


class LoadError(RuntimeError):
    """A request failed."""


class Book:
    """What has come so far, on all connections."""

    def __init__(self) -> None:
        self.chunks = 0
        self.ttfb_s: list[float] = []
        self.total_s: list[float] = []
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, problem: str) -> None:
        """Note the first failure."""
        if not self.failed.done():
            self.failed.set_exception(LoadError(problem))


class Connection(asyncio.Protocol):
    """One connection of the load; it sends its first request after `delay_s`."""

    _sent: float
    _first: float
    """When the body began; 0 before."""
    _seen: int
    """Events of this reply so far."""
    _tail: bytes
    _error: bytes

    def __init__(self, request: bytes, events: int, book: Book, delay_s: float) -> None:
        self._request = request
        self._events = events
        self._book = book
        self._delay_s = delay_s
        self._parser = httptools.HttpResponseParser(self)
        self._ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, after the delay."""
        self._transport = cast(asyncio.Transport, transport)
        asyncio.get_running_loop().call_later(self._delay_s, self._send)

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._book.fail(f"the reply is no HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """No target may close a connection under load."""
        if not self._ended:
            self._book.fail(f"the connection was closed ({exc or 'no error'})")

    def close(self) -> None:
        """End, on purpose."""
        self._ended = True
        self._transport.abort()

    def on_headers_complete(self) -> None:
        """See whether it is an error, of which the beginning of the body is told."""
        status = self._parser.get_status_code()
        self._error = b"" if status == 200 else f"status {status}: ".encode()

    def on_body(self, body: bytes) -> None:
        """Count the events; proxies may cut them anywhere."""
        if self._error:
            self._error += body
        if not self._first:
            self._first = time.perf_counter()
        if self._events:
            text = self._tail + body
            found = text.count(wire.EVENT_MARK)
            # Too short for a whole mark, so that none is counted twice.
            self._tail = text[-len(wire.EVENT_MARK) + 1 :]
            self._seen += found
            self._book.chunks += found

    def on_message_complete(self) -> None:
        """Note the request and send the next."""
        now = time.perf_counter()
        if self._error:
            self._book.fail(self._error[:MOST_OF_AN_ERROR].decode(errors="replace"))
            return
        if self._seen < self._events:
            self._book.fail(f"a stream ended after {self._seen} of {self._events} events")
            return
        self._book.ttfb_s.append((self._first or now) - self._sent)
        self._book.total_s.append(now - self._sent)
        if not self._parser.should_keep_alive():
            self._book.fail("the target does not keep connections open")
            return
        # Not from inside the parser, which is still at work on this reply.
        asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._seen, self._tail, self._first = 0, b"", 0.0
        self._sent = time.perf_counter()
        self._transport.write(self._request)


def request_bytes(settings: LoadSettings) -> bytes:
    """The request, head and body."""
    body = wire.request_body(Asked(settings.chunks, settings.pause_ms, settings.stream))
    head = (
        f"POST {wire.PATH} HTTP/1.1\r\nhost: {urlsplit(settings.url).netloc}\r\n"
        f"content-type: application/json\r\naccept: */*\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def run_load(settings: LoadSettings) -> Load:
    """Warm up, measure for a window, and return what came; raises LoadError."""
    book = Book()
    connections = await _connect(settings, book)
    try:
        await _pass(settings.warm_up_s, book)
        before, requests = book.chunks, len(book.total_s)
        _say("begin")
        began, cpu = time.perf_counter(), time.process_time()
        await _pass(settings.seconds, book)
        while len(book.total_s) - requests < settings.connections:
            if time.perf_counter() - began > SLOW_WITHIN_S:
                break
            await _pass(LOOK_EVERY_S, book)
        seconds, chunks = time.perf_counter() - began, book.chunks - before
        cpu = time.process_time() - cpu
        ttfb_s, total_s = book.ttfb_s[requests:], book.total_s[requests:]
        _say("end")
        if not total_s:
            raise LoadError(f"no request was complete after {seconds:.0f} s")
    finally:
        for connection in connections:
            connection.close()
    return Load(
        seconds=seconds,
        requests=len(total_s),
        chunks=chunks,
        ttfb=latency(ttfb_s),
        total=latency(total_s),
        client_cpu_s=cpu,
    )


async def _connect(settings: LoadSettings, book: Book) -> list[Connection]:
    """All connections, their first requests spread over the time that one takes."""
    draw = random.Random(settings.seed)
    spread_s = settings.chunks * settings.pause_ms / 1e3 if settings.stream else 0.0
    spread_s = min(spread_s, settings.warm_up_s)
    request, url = request_bytes(settings), urlsplit(settings.url)
    port = url.port or 80
    # The mock's `[DONE]` is an event, too.
    events = settings.chunks + 1 if settings.stream else 0
    loop = asyncio.get_running_loop()
    connections = []
    for _ in range(settings.connections):
        made = Connection(request, events, book, draw.uniform(0.0, spread_s))
        try:
            await loop.create_connection(functools.partial(_the, made), url.hostname or "", port)
        except OSError as error:
            raise LoadError(f"no connection to {settings.url}: {error}") from None
        connections.append(made)
    return connections


def _the(connection: Connection) -> Connection:
    return connection


async def _pass(seconds: float, book: Book) -> None:
    """Let this time pass; raises LoadError as soon as a request fails."""
    await asyncio.wait({book.failed}, timeout=seconds)
    if book.failed.done():
        book.failed.result()


def _say(word: str) -> None:
    print(word, flush=True)


def main() -> None:
    """Run one load."""
    settings = LoadSettings.model_validate_json(sys.argv[1])
    try:
        load = uvloop.run(run_load(settings))
    except LoadError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    print(load.model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
