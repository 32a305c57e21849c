"""A lease: the right to send one request to one replica's own HTTP server.

Owns the values that cross from an engine replica to the gateway and the book of
leases a replica keeps. A lease ends when the HTTP request that carries its id
has ended, so a slot is never freed while the engine works, nor kept after it;
a gateway that dies takes its connections, and with them its leases, along.
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
    started: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class LeaseBook:
    """The open leases of one replica."""

    def __init__(self, start_within_s: float = START_WITHIN_S) -> None:
        self._leases: dict[str, _Lease] = {}
        self._start_within_s = start_within_s

    @property
    def open_count(self) -> int:
        """How many leases are held now."""
        return len(self._leases)

    @property
    def running_count(self) -> int:
        """How many of them have a request that runs."""
        leases = self._leases.values()
        return sum(lease.started.is_set() and not lease.ended.is_set() for lease in leases)

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
        """Return when the lease's request has ended, or did not start in time."""
        lease = self._leases[lease_id]
        try:
            async with asyncio.timeout(self._start_within_s):
                await lease.started.wait()
        except TimeoutError:
            return
        await lease.ended.wait()

    def request_started(self, lease_id: str) -> None:
        """The HTTP request that carries this lease has arrived; unknown ids are ignored."""
        if lease := self._leases.get(lease_id):
            lease.started.set()

    def request_ended(self, lease_id: str) -> None:
        """The HTTP request that carries this lease is over; unknown ids are ignored."""
        if lease := self._leases.get(lease_id):
            lease.started.set()
            lease.ended.set()
