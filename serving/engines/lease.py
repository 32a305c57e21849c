"""A lease: the right to send one request to one replica's own HTTP port.

Owns the values that cross from an engine replica to the gateway and the book of
leases a replica keeps. A lease ends when the HTTP request that carries its id
has ended, so a slot is never freed while the engine works, nor kept after it;
a gateway that dies takes its connections, and with them its leases, along.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field

LEASE_HEADER = "x-moe-serving-lease"
# A gateway connects at once; one that has not by then is gone.
START_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a leased request goes: a base URL without trailing slash, and who answers there."""

    url: str
    replica: str
    lease_id: str


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

    def grant(self) -> str:
        """Open a lease and return its id."""
        lease_id = secrets.token_hex(8)
        self._leases[lease_id] = _Lease()
        return lease_id

    async def wait_until_ended(self, lease_id: str) -> None:
        """Return when the lease's request has ended, or did not start in time.

        Whatever ends the wait, cancellation included, closes the lease.
        """
        lease = self._leases[lease_id]
        try:
            async with asyncio.timeout(self._start_within_s):
                await lease.started.wait()
            await lease.ended.wait()
        except TimeoutError:
            pass
        finally:
            self._leases.pop(lease_id, None)

    def request_started(self, lease_id: str) -> None:
        """The HTTP request that carries this lease has arrived; unknown ids are ignored."""
        if lease := self._leases.get(lease_id):
            lease.started.set()

    def request_ended(self, lease_id: str) -> None:
        """The HTTP request that carries this lease is over; unknown ids are ignored."""
        if lease := self._leases.get(lease_id):
            lease.started.set()
            lease.ended.set()
