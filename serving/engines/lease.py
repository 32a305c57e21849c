"""A lease: the right to send requests to one replica's own HTTP server, one after the other.

Owns the values that cross from an engine replica to the gateway and the book of
leases a replica keeps. A slot is never freed while the engine works. A lease whose
request has ended is open for a moment, for the gateway to send the next one; then it
ends by itself, so a gateway that dies takes its connections, and with them its leases, along.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LEASE_HEADER = "x-moe-serving-lease"
# A gateway connects at once; one that has not by then is gone.
START_WITHIN_S = 10.0
# Longer than the gateway keeps one that it does not use.
KEPT_FOR_S = 1.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a leased request goes: a base URL without trailing slash, and who answers there.

    `socket` is the path of a unix socket where the same server listens for processes of the Ray
    node `node`; None where it has none. `unfit` says why the replica should get no request; it is
    empty where it should.
    """

    url: str
    replica: str
    lease_id: str
    node: str = ""
    socket: str | None = None
    unfit: str = ""


@dataclass(slots=True)
class _Lease:
    running: int = 0
    """Requests; a second begins where the end of the first is not known yet."""
    began: bool = False
    busy: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class LeaseBook:
    """The open leases of one replica; times in seconds."""

    def __init__(
        self, start_within_s: float = START_WITHIN_S, kept_for_s: float = KEPT_FOR_S
    ) -> None:
        self._leases: dict[str, _Lease] = {}
        self._start_within_s = start_within_s
        self._kept_for_s = kept_for_s

    @property
    def open_count(self) -> int:
        """How many leases are held now."""
        return len(self._leases)

    @property
    def running_count(self) -> int:
        """How many of them have a request that runs."""
        return sum(lease.running > 0 for lease in self._leases.values())

    @contextmanager
    def granted(self) -> Iterator[str]:
        """A lease for as long as the block runs, by its id.

        A gateway that gives up at once ends the block before anything was waited for.
        """
        lease_id = secrets.token_hex(8)
        self._leases[lease_id] = _Lease()
        try:
            yield lease_id
        finally:
            del self._leases[lease_id]

    async def wait_until_ended(self, lease_id: str) -> None:
        """Return when the lease's request has ended and no other came, or none did in time."""
        lease = self._leases[lease_id]
        while lease.running or await self._begins(lease):
            await lease.idle.wait()

    async def _begins(self, lease: _Lease) -> bool:
        try:
            async with asyncio.timeout(self._kept_for_s if lease.began else self._start_within_s):
                return await lease.busy.wait()
        except TimeoutError:
            return False

    def request_started(self, lease_id: str) -> None:
        """An HTTP request that carries this lease has arrived; unknown ids are ignored."""
        if lease := self._leases.get(lease_id):
            lease.running += 1
            lease.began = True
            lease.idle.clear()
            lease.busy.set()

    def request_ended(self, lease_id: str) -> None:
        """An HTTP request that carries this lease is over; unknown ids are ignored."""
        if lease := self._leases.get(lease_id):
            lease.running -= 1
            if not lease.running:
                lease.busy.clear()
                lease.idle.set()
