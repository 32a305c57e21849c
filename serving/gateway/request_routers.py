"""Serve's request routers, kept from replicas whose breaker is open.

Owns the classes behind the names of `router.balancing`, their settings, and having a handle use
them. Leaves the choice between replicas to Serve 2.60's own classes, and which replicas are left
alone to `breakers`.

A handle's request router lives in the process that has the handle, so it sees that process's
breakers. Its class is given to the handle and not to the engine's deployment: with HAProxy on,
Serve refuses an application whose ingress deployment names any class but Serve's default, even
where the application has no route.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

# By its public name, `ray.serve.llm.request_router`, each gateway process would import vLLM
# with it: 665 MB, and 12 s in which its event loop stands still.
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter,
)
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.default_impl import create_router
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import RequestRouter
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.handle import DeploymentHandle

from serving.gateway import breakers
from serving.router.balancing import Balancing

Ranks = list[list[RunningReplica]]
"""Replicas to try, the best first; within a rank Serve takes the shortest queue."""


class _WithBreakers(RequestRouter):
    """Stands before one of Serve's classes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.breakers = breakers.breakers

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> Ranks:
        """What Serve's class chooses, without replicas that may get nothing.

        Where that leaves some out, all that may get a request come last. Where none may, Serve
        asks again, after 25 ms at first and 0.5 s later on, until the request is cancelled.
        """
        # Not given fewer candidates: Serve's classes look theirs up in this list, and an empty
        # one makes the session-hash one spin.
        chosen: Ranks = await super().choose_replicas(candidate_replicas, pending_request)
        ranks = [self._allowed(rank) for rank in chosen]
        return ranks if ranks == chosen else [*ranks, self._allowed(candidate_replicas)]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """The replica that the request is sent to as soon as this returns."""
        lease = pending_request.metadata.internal_request_id
        while True:
            replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
            if self.breakers.take(replica.replica_id.unique_id, lease):
                return replica
            # Since it was chosen, its breaker opened, or another request became its trial.
            is_retry = True

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """The lease is over, whatever became of it."""
        super().on_request_completed(replica_id, internal_request_id)
        self.breakers.ended(replica_id.unique_id, internal_request_id)

    @property
    def answers_nobody(self) -> bool:
        """Whether it knows replicas, and the breaker of each is open."""
        replicas = list(self.curr_replicas)
        return bool(replicas) and all(
            self.breakers.state(each.unique_id) == "open" for each in replicas
        )

    def _allowed(self, replicas: Iterable[RunningReplica]) -> list[RunningReplica]:
        return [each for each in replicas if self.breakers.allows(each.replica_id.unique_id)]


class PowerOfTwo(_WithBreakers, PowerOfTwoChoicesRequestRouter):
    """The shorter queue of two replicas drawn at random, Serve's default."""


class PrefixAware(_WithBreakers, PrefixCacheAffinityRouter):
    """The replica that saw the longest beginning of this prompt."""

    def initialize_state(self, **settings: Any) -> None:
        """Set what Serve's defaults leave without bound; `settings` are added.

        They would follow the prefix into any queue, and keep every prompt: 10 requests more
        than the shortest queue send it elsewhere, and beyond 400,000 characters the oldest
        are forgotten.
        """
        super().initialize_state(imbalanced_threshold=10, do_eviction=True, **settings)

    async def _prefix_match_best_replicas(
        self, pending_request: PendingRequest | None, candidate_replicas: list[RunningReplica]
    ) -> Ranks:
        # Serve asks each candidate for its queue, and waits for one that hangs.
        allowed = self._allowed(candidate_replicas)
        if not allowed:
            return [[]]
        ranks: Ranks = await super()._prefix_match_best_replicas(pending_request, allowed)
        return ranks


class SessionHash(_WithBreakers, ConsistentHashRouter):
    """The replica on the hash ring; two more are tried where it has no slot free."""


REQUEST_ROUTERS: dict[Balancing, type[RequestRouter]] = {
    "power-of-two": PowerOfTwo,
    "prefix-aware": PrefixAware,
    "session-hash": SessionHash,
}


def answers_nobody(handle: DeploymentHandle) -> bool:
    """Whether a lease by this handle would only wait for a breaker to be half-open."""
    router = handle._router._asyncio_router.request_router
    return isinstance(router, _WithBreakers) and router.answers_nobody


def takes_requests(handle: DeploymentHandle, replica: str) -> bool:
    """Whether the handle may send `replica` more requests: it runs, and its breaker is closed."""
    router = handle._router._asyncio_router.request_router
    known = ReplicaID(replica, handle.deployment_id) in router.curr_replicas
    return known and breakers.breakers.state(replica) == "closed"


def routing_by(balancing: Balancing) -> Callable[..., Any]:
    """What a new `DeploymentHandle` takes as `_create_router` to balance by this policy."""

    def create(handle_id: str, deployment_id: DeploymentID, handle_options: Any) -> Any:
        router = create_router(
            handle_id,
            deployment_id,
            handle_options,
            request_router_class=REQUEST_ROUTERS[balancing],
        )
        # Made by being asked for, and then kept. The deployment's own settings are on their
        # way and name Serve's default.
        _ = router._asyncio_router.request_router
        return router

    return create
