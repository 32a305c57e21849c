"""Leases whose request has ended, kept for the next request to the same engine.

Owns how long one is kept and which is taken. To take one through Serve's router costs more CPU
time than all else that the gateway does for a request; one that is used again costs a lookup.
Leaves to `leases` who may use one, and to `request_routers` which replicas may still get requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentResponseGenerator

from serving.engines.lease import Endpoint

# Before the replica ends it by itself, so that none is used that is over.
IDLE_S = 0.5
# Then Serve's router is asked again, so that a new replica gets its share; at different times, so
# that leases which were taken together do not end together.
OLDEST_S = (5.0, 15.0)
# Serve's router answers sooner where a slot is free; who waits longer waits for one.
ANSWERS_WITHIN_S = 0.1


def release(stream: DeploymentResponseGenerator) -> None:
    """Give back the slot that a lease's call holds or waits for."""
    with contextlib.suppress(RayError, RayServeException):
        stream.cancel()


@dataclass(slots=True, eq=False)
class Lease:
    """One slot of one replica, which Serve counts until `release`."""

    stream: DeploymentResponseGenerator
    endpoint: Endpoint
    renewed_at: float = field(default_factory=lambda: time.monotonic() + random.uniform(*OLDEST_S))
    """Not used for another request from then on, by the monotonic clock."""
    expiry: asyncio.TimerHandle | None = None

    def release(self) -> None:
        """Give the slot back to Serve."""
        release(self.stream)


class IdleLeases:
    """Those of one engine application, for one event loop.

    `usable` says of a replica whether it may get more requests.
    """

    def __init__(self, usable: Callable[[str], bool]) -> None:
        self._usable = usable
        self._idle: defaultdict[str, list[Lease]] = defaultdict(list)
        self._running: Counter[str] = Counter()
        self._waiting: dict[object, float] = {}

    def take(self) -> Lease | None:
        """One on the replica that has the fewest requests from here; None where there is none."""
        for replica in sorted(self._idle, key=self._running.__getitem__):
            if self._usable(replica):
                lease = self._idle[replica].pop()
                if not self._idle[replica]:
                    del self._idle[replica]
                if lease.expiry is not None:
                    lease.expiry.cancel()
                return lease
            self._drop(replica)
        return None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A request waits for Serve's router, as long as the block runs."""
        request = object()
        self._waiting[request] = time.monotonic()
        try:
            yield
        finally:
            del self._waiting[request]

    def begun(self, lease: Lease) -> None:
        """A request begins with it."""
        self._running[lease.endpoint.replica] += 1

    def ended(self, lease: Lease, *, whole: bool) -> None:
        """Its request is over: keep the lease where that was answered as a `whole`, for a while.

        Not where another waits for a slot, which in Serve's queue was there before the next one.
        """
        replica = lease.endpoint.replica
        self._running[replica] -= 1
        if not self._running[replica]:
            del self._running[replica]
        now = time.monotonic()
        longest = now - next(iter(self._waiting.values()), now)
        if not whole or now > lease.renewed_at or longest > ANSWERS_WITHIN_S:
            lease.release()
            return
        self._idle[replica].append(lease)
        lease.expiry = asyncio.get_running_loop().call_later(IDLE_S, self._expire, lease)

    def clear(self) -> None:
        """Give back every one that is not in use."""
        for replica in list(self._idle):
            self._drop(replica)

    def _expire(self, lease: Lease) -> None:
        replica = lease.endpoint.replica
        self._idle[replica].remove(lease)
        if not self._idle[replica]:
            del self._idle[replica]
        lease.release()

    def _drop(self, replica: str) -> None:
        for lease in self._idle.pop(replica):
            if lease.expiry is not None:
                lease.expiry.cancel()
            lease.release()
