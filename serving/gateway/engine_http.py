"""HTTP/1.1 to engine ports: one POST at a time on a connection, the reply as it comes.

Owns the connections, over the engine's unix socket where it is on this node and over TCP
elsewhere, and keeps them for the next request. Leaves what a reply means to `relay`. A parser
and a list of parts are all that stands between the socket and who reads: this is on the way of
every token.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import cast
from urllib.parse import urlsplit

import httptools

from serving.engines.lease import Endpoint

# An engine's head has some 200 bytes.
MAX_HEAD_BYTES = 64 * 1024
# More than this unread, and the engine has to wait.
HIGH_WATER_BYTES = 64 * 1024
# Engines close what was idle for 75 s; whatever lost it in silence has by then, too.
IDLE_S = 30.0


class EngineConnectionError(Exception):
    """An engine cannot be reached, or its connection broke before the reply was complete."""


class EngineSilentError(EngineConnectionError):
    """An engine has the request and sent nothing for `limit_s` seconds."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"the engine sent nothing for {limit_s:g} s")
        self.limit_s = limit_s


class EngineConnection(asyncio.Protocol):
    """One connection to an engine, and the reply that comes on it."""

    status: int
    headers: dict[bytes, bytes]
    """By name, in lower case."""
    _head_bytes: int
    _head_complete: bool
    _parts: list[bytes]
    """What of the body was not read yet, `_unread` bytes."""
    _unread: int
    _complete: bool
    _keep_alive: bool

    def __init__(self, on_lost: Callable[[EngineConnection], None]) -> None:
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        # One timer for many waits: to make and cancel one for each would cost as much as the rest
        # of a read. It looks at the time limit when it fires, and goes off again at that.
        self._timer: asyncio.TimerHandle | None = None
        self._within_s = self._deadline = math.inf
        self._problem: str | None = None
        self._expect_reply()
        # Nothing was asked, so nothing may come.
        self._complete = True
        self.idle_since = 0.0

    # --- for who asks ---------------------------------------------------------------------

    async def ask(self, head: bytes, body: bytes, within_s: float | None = None) -> None:
        """Send one request and return when the head of its reply is here.

        Raises EngineConnectionError; `replied` then says whether any of the reply came.
        EngineSilentError where nothing came for `within_s`.
        """
        self._expect_reply()
        self._transport.writelines((head, body))
        while not self._head_complete:
            await self._more(within_s)

    async def read(self, within_s: float | None = None) -> bytes:
        """All of the body that came since the last call; b"" at its end.

        Raises EngineConnectionError where the connection broke before that, EngineSilentError
        where nothing came for `within_s`.
        """
        while not self._parts:
            if self._complete:
                return b""
            await self._more(within_s)
        parts = self._parts
        self._parts = []
        if self._unread > HIGH_WATER_BYTES and self._problem is None:
            self._transport.resume_reading()
        self._unread = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def content_type(self) -> str:
        """The reply's content type; JSON where it names none."""
        return self.headers.get(b"content-type", b"application/json").decode("latin-1")

    @property
    def content_length(self) -> int | None:
        """The length of the body in bytes, where the engine told it."""
        length = self.headers.get(b"content-length")
        return int(length) if length is not None else None

    @property
    def replied(self) -> bool:
        """Whether anything of a reply came."""
        return self._head_bytes > 0

    @property
    def reusable(self) -> bool:
        """Whether the request is over on both sides and the connection can take another."""
        return (
            self._complete
            and self._keep_alive
            and self._problem is None
            and not self._parts
            # Answered before it was sent: the rest of the request would be the next one's head.
            and self._transport.get_write_buffer_size() == 0
        )

    def abort(self) -> None:
        """Close the connection at once; the engine drops what it still does for it."""
        self._break("the connection was given up")

    def _expect_reply(self) -> None:
        self.status = self._head_bytes = self._unread = 0
        self.headers, self._parts = {}, []
        self._head_complete = self._complete = self._keep_alive = False

    async def _more(self, within_s: float | None) -> None:
        """Return when something has come; raises EngineConnectionError where nothing will."""
        if self._problem is not None:
            raise EngineConnectionError(self._problem)
        if within_s is None:
            self._deadline = math.inf
        else:
            self._within_s, self._deadline = within_s, self._loop.time() + within_s
            if self._timer is None or self._deadline < self._timer.when():
                self._set_timer()
        self._waiter = waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if self._loop.time() >= self._deadline:
            self._waiter.set_exception(EngineSilentError(self._within_s))
        elif self._deadline < math.inf:
            self._set_timer()

    def _break(self, problem: str) -> None:
        if self._problem is None:
            self._problem = problem
        self._transport.abort()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- for the event loop ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse what came and wake who waits for it."""
        if self._complete:
            self._break("the engine sent what nobody asked for")
            return
        if not self._head_complete:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(f"the engine's reply is not HTTP/1.1: {error}")
            return
        if self._head_bytes > MAX_HEAD_BYTES and not self._head_complete:
            self._break(f"the head of the engine's reply is over {MAX_HEAD_BYTES} bytes")
            return
        if self._unread > HIGH_WATER_BYTES:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell who waits, and the pool."""
        # A reply whose end is the connection's counts as cut: a whole one looks no different.
        if self._problem is None:
            self._problem = f"the engine closed the connection ({exc or 'no error'})"
        if self._timer is not None:
            self._timer.cancel()
        self._wake()
        self._on_lost(self)

    # --- for the parser -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Refuse a second reply that comes with the first; the parser makes an error of it."""
        if self._head_complete:
            raise EngineConnectionError

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep one header of the reply."""
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Note the status; the body begins."""
        self.status = self._parser.get_status_code()
        self._head_complete = True

    def on_body(self, body: bytes) -> None:
        """Keep one part of the body until it is read."""
        self._parts.append(body)
        self._unread += len(body)

    def on_message_complete(self) -> None:
        """Note the end of the reply."""
        self._complete = True
        self._keep_alive = self._parser.should_keep_alive()


class EngineClient:
    """The connections of one gateway process to all engines.

    `node` is the Ray node of this process; sockets of engines on other nodes are of no use.
    """

    def __init__(self, node: str = "") -> None:
        self._node = node
        # By socket path or base URL; in each, the one used last is taken first.
        self._idle: dict[str, dict[EngineConnection, None]] = {}

    @asynccontextmanager
    async def post(
        self,
        endpoint: Endpoint,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        connect_timeout_s: float,
        reply_within_s: float | None = None,
    ) -> AsyncIterator[EngineConnection]:
        """POST `body` and yield the connection when the head of the reply is here.

        A block that ends before the reply does closes the connection, and so ends the engine's
        work. Raises EngineConnectionError, EngineSilentError where no head came for
        `reply_within_s`; ValueError for a header that would be two.
        """
        head = _head(endpoint.url, path, headers, len(body))
        place, connection = await self._ask(endpoint, head, body, connect_timeout_s, reply_within_s)
        try:
            yield connection
        finally:
            if connection.reusable:
                connection.idle_since = asyncio.get_running_loop().time()
                self._idle.setdefault(place, {})[connection] = None
            else:
                connection.abort()

    def close(self) -> None:
        """Close every connection that is idle; those in use end with their requests."""
        for place in list(self._idle):
            for connection in list(self._idle[place]):
                connection.abort()

    async def _ask(
        self,
        endpoint: Endpoint,
        head: bytes,
        body: bytes,
        connect_timeout_s: float,
        reply_within_s: float | None,
    ) -> tuple[str, EngineConnection]:
        """Send the request on an idle connection or a new one, until a reply begins."""
        places = [endpoint.url]
        if endpoint.socket and endpoint.node == self._node:
            places.insert(0, endpoint.socket)
        kept = self._kept(places)
        while True:
            place, connection = kept or await self._open(places, connect_timeout_s)
            try:
                await connection.ask(head, body, reply_within_s)
                return place, connection
            except EngineConnectionError as error:
                # Closed by the engine just when it was taken: this request never began.
                if kept is None or connection.replied or isinstance(error, EngineSilentError):
                    connection.abort()
                    raise
                kept = None
            except BaseException:
                connection.abort()
                raise

    def _kept(self, places: list[str]) -> tuple[str, EngineConnection] | None:
        oldest = asyncio.get_running_loop().time() - IDLE_S
        for place in places:
            idle = self._idle.get(place, {})
            while idle:
                connection, _ = idle.popitem()
                if connection.idle_since > oldest and connection.reusable:
                    return place, connection
                connection.abort()
        return None

    async def _open(self, places: list[str], timeout_s: float) -> tuple[str, EngineConnection]:
        """A new connection to the first of `places` that takes one."""
        problem: OSError | None = None
        for place in places:
            try:
                async with asyncio.timeout(timeout_s):
                    return place, await _connect(place, functools.partial(self._forget, place))
            except OSError as error:
                problem = error
        raise EngineConnectionError(f"{places[-1]} takes no connection: {problem!r}")

    def _forget(self, place: str, connection: EngineConnection) -> None:
        idle = self._idle.get(place, {})
        idle.pop(connection, None)
        if not idle:
            self._idle.pop(place, None)


async def _connect(place: str, on_lost: Callable[[EngineConnection], None]) -> EngineConnection:
    loop = asyncio.get_running_loop()
    made = functools.partial(EngineConnection, on_lost)
    if place.startswith("/"):
        return (await loop.create_unix_connection(made, place))[1]
    url = urlsplit(place)
    return (await loop.create_connection(made, url.hostname or "", url.port or 80))[1]


def _head(url: str, path: str, headers: Mapping[str, str], length: int) -> bytes:
    """The head of a POST; raises ValueError where a value holds a line break."""
    lines = [f"POST {path} HTTP/1.1", f"host: {urlsplit(url).netloc}", f"content-length: {length}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header of the request holds a line break")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
