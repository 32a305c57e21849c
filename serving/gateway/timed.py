"""A reply that notes on its way what has to be known of it.

Owns when its parts came, their last bytes, and the tokens of a team's reply. Leaves what they mean
to `splits`, `kept` and the room `teams`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from serving.engines.keys import Send
from serving.gateway.call import FALLBACK_HEADER, REPLICA_HEADER
from serving.gateway.relay import Reply
from serving.gateway.usage import Tail
from serving.router.request import VARIANT_HEADER
from serving.teams.ledger import Entry
from serving.teams.metering import Asked, Meter, Usage


class TimedReply(Reply):
    """A reply with its status, the time of its first part and its tail.

    `on_first` is called with the first part of the body, before the client has it.
    """

    def __init__(
        self, send: Send, request_id: str, on_first: Callable[[TimedReply, bytes], None]
    ) -> None:
        super().__init__(send, request_id)
        self._on_first = on_first
        self.status: int | None = None
        self.first_at: float | None = None
        """When the first part of the body was here, by `time.perf_counter`."""
        self.tail = Tail()

    @property
    def replica(self) -> str | None:
        """The replica that answers, once there is one."""
        named = dict(self.headers).get(REPLICA_HEADER.encode())
        return named.decode() if named else None

    async def start(self, status: int, content_type: bytes, length: int | None = None) -> None:
        """Send status and headers."""
        self.status = status
        await super().start(status, content_type, length)

    async def write(self, chunk: bytes, *, more: bool = True) -> None:
        """Send a part of the body."""
        if self.first_at is None:
            self.first_at = time.perf_counter()
            self._on_first(self, chunk)
        self.tail.feed(chunk)
        await super().write(chunk, more=more)


class MeteredReply(TimedReply):
    """A reply whose tokens are counted as its engine tells them, seen by the client or not.

    `entry` is its place in the ledger, once the request is admitted.
    """

    def __init__(
        self,
        send: Send,
        request_id: str,
        on_first: Callable[[TimedReply, bytes], None],
        path: str,
        asked: Asked,
    ) -> None:
        super().__init__(send, request_id, on_first)
        self._path = path
        self._asked = asked
        self._meter: Meter | None = None
        self.entry: Entry | None = None

    @property
    def usage(self) -> Usage:
        """The tokens of what came so far."""
        return Usage() if self._meter is None else self._meter.usage()

    async def start(self, status: int, content_type: bytes, length: int | None = None) -> None:
        """Send status and headers."""
        if self._meter is None:
            self._meter = Meter(self._path, self.streaming, self._asked)
        told = dict(self.headers)
        variant = told.get(VARIANT_HEADER.encode(), b"").decode()
        if self.entry is not None and (variant or FALLBACK_HEADER.encode() in told):
            # Another model may answer, or a server outside.
            other, _, there = told.get(FALLBACK_HEADER.encode(), b"").decode().partition("@")
            self.entry.answered(other or None, variant or there, status)
        await super().start(status, content_type, length)

    async def write(self, chunk: bytes, *, more: bool = True) -> None:
        """Send what the client asked for of a part of the body."""
        assert self._meter is not None
        if self.entry is not None and self.first_at is None:
            self.entry.first_token()
        seen = self._meter.feed(chunk)
        if not more:
            seen += self._meter.rest()
        if self.entry is not None and self.entry.due:
            self.entry.note(self._meter.usage())
        if seen or not more:
            await super().write(seen, more=more)
