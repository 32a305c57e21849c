"""A reply that notes on its way what has to be known of it.

Owns when its parts came and their last bytes. Leaves what both mean to `splits` and `kept`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from serving.engines.keys import Send
from serving.gateway.call import REPLICA_HEADER
from serving.gateway.relay import Reply
from serving.gateway.usage import Tail


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
