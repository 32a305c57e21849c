"""No request goes to a replica whose breaker is open: Serve's own routers, with fake replicas."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partialmethod
from typing import Any, get_args

import pytest
import ray
from ray._private import auto_init_hook
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree
from ray.serve._private import router as serves_router
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    DeploymentTargetInfo,
    RequestMetadata,
)
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.default_impl import create_router
from ray.serve._private.handle_options import DynamicHandleOptions, InitHandleOptions
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.request_router import RequestRouter
from ray.serve._private.test_utils import FakeRunningReplica
from ray.serve._private.usage import ServeUsageTag
from ray.serve.handle import DeploymentHandle

from serving.gateway import request_routers
from serving.gateway.breakers import FIRST_OPEN_S, Breakers, breakers
from serving.gateway.request_routers import REQUEST_ROUTERS, PrefixAware, SessionHash, routing_by
from serving.router.balancing import Balancing, Hint

DEPLOYMENT = DeploymentID(name="engine", app_name="engine-mtp")
EVERY_POLICY = pytest.mark.parametrize("policy", get_args(Balancing))


class LocalTree:
    """Serve's tree of prompts without its actor: each call's answer is there at once."""

    def __init__(self) -> None:
        self.tree = PrefixTree()

    def __getattr__(self, name: str) -> Any:
        answer = (lambda *_: None) if name == "start_eviction_loop" else getattr(self.tree, name)
        return type("Method", (), {"remote": staticmethod(answer)})


class Stand:
    """One of our routers, its replicas, its breakers' clock, and requests that wait in it."""

    def __init__(self, router: RequestRouter) -> None:
        self.router = router
        self.seconds = 1000.0
        self.breakers = router.breakers = Breakers(lambda: self.seconds)
        self.asked = 0
        self.backoffs = 0
        self._waiting: list[asyncio.Task[str]] = []
        self._ids = iter(range(10_000))
        self._choose, router.choose_replicas = router.choose_replicas, self._count_and_choose
        router._backoff = self._back_off

    async def _count_and_choose(self, **arguments: Any) -> Any:
        self.asked += 1
        return await self._choose(**arguments)

    async def _back_off(self, attempt: int) -> None:
        self.backoffs += 1
        await asyncio.sleep(0)

    def replicas(self, names: str, queue: int | None = 0) -> dict[str, FakeRunningReplica]:
        """Give the router these replicas, with queues of this length; None never answers."""
        made = {name: FakeRunningReplica(name, max_ongoing_requests=1000) for name in names}
        if queue is not None:
            for each in made.values():
                each.set_queue_len_response(queue)
        self.router.update_replicas(list(made.values()))
        return made

    def request(self, session: str = "", prompt: str = "") -> PendingRequest:
        number = f"lease-{next(self._ids)}"
        return PendingRequest(
            args=[Hint(prompt=prompt)] if prompt else [],
            kwargs={},
            metadata=RequestMetadata(number, number, session_id=session),
        )

    def send(self, request: PendingRequest | None = None) -> asyncio.Task[str]:
        """A request on its way; the result is the replica that it goes to."""
        task = asyncio.create_task(self._place(request or self.request()))
        self._waiting.append(task)
        return task

    async def _place(self, request: PendingRequest) -> str:
        replica = await self.router._choose_replica_for_request(request)
        # What Serve tells its routers when the replica has taken the request.
        self.router.on_send_request(replica.replica_id)
        self.router.on_request_routed(request, replica.replica_id, None)
        return str(replica.replica_id.unique_id)

    def open(self, *names: str) -> None:
        for name in names:
            self.breakers.fault(name)

    def half_open(self, *names: str) -> None:
        self.open(*names)
        self.seconds += FIRST_OPEN_S

    async def settle(self) -> None:
        """Let the router ask for replicas in vain a few times over."""
        enough = self.backoffs + 20
        for _ in range(2000):
            await asyncio.sleep(0)
            if self.backoffs >= enough:
                return

    async def end(self) -> None:
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)
        for task in list(self.router._routing_tasks):
            task.cancel()


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.get` gives what `LocalTree` gave, and nothing starts a Ray of its own."""
    monkeypatch.setattr(auto_init_hook, "enable_auto_connect", False)
    monkeypatch.setattr(ray, "get", lambda answer: answer)


@asynccontextmanager
async def standing(policy: Balancing, cache: bool = True) -> AsyncIterator[Stand]:
    router = REQUEST_ROUTERS[policy](
        deployment_id=DEPLOYMENT,
        handle_source=DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=cache,
    )
    tree = {"tree_actor": LocalTree()} if policy == "prefix-aware" else {}
    router.initialize_state(**tree)
    stand = Stand(router)
    try:
        yield stand
    finally:
        await stand.end()


async def placed(tasks: Sequence[asyncio.Task[str]]) -> list[str]:
    async with asyncio.timeout(10):
        return await asyncio.gather(*tasks)


def done(tasks: Sequence[asyncio.Task[str]]) -> list[str]:
    return [task.result() for task in tasks if task.done()]


def prompts_and_sessions(stand: Stand) -> Iterator[PendingRequest]:
    for number in range(60):
        yield stand.request(session=f"s-{number}", prompt=f"{number} times upon a time")


@EVERY_POLICY
async def test_the_class_goes_before_the_one_serve_has_for_the_policy(policy: Balancing) -> None:
    serves = {
        "power-of-two": "PowerOfTwoChoicesRequestRouter",
        "prefix-aware": "PrefixCacheAffinityRouter",
        "session-hash": "ConsistentHashRouter",
    }
    ours = REQUEST_ROUTERS[policy]
    assert ours.__bases__[-1].__name__ == serves[policy]


@EVERY_POLICY
async def test_requests_go_to_all_replicas_but_the_open_ones(policy: Balancing) -> None:
    async with standing(policy) as stand:
        stand.replicas("abcde")
        stand.open("a", "b", "c")
        went = [await placed([stand.send(each)]) for each in prompts_and_sessions(stand)]
        assert {name for names in went for name in names} == {"d", "e"}


@EVERY_POLICY
async def test_the_last_replica_left_takes_all_requests(policy: Balancing) -> None:
    async with standing(policy) as stand:
        stand.replicas("abcdefgh")
        stand.open(*"abcdefg")
        tasks = [stand.send(request) for request in prompts_and_sessions(stand)]
        assert set(await placed(tasks)) == {"h"}


@EVERY_POLICY
async def test_nobody_answers_where_there_are_replicas_and_all_are_open(policy: Balancing) -> None:
    async with standing(policy) as stand:
        assert not stand.router.answers_nobody
        stand.replicas("ab")
        stand.open("a")
        assert not stand.router.answers_nobody
        stand.open("b")
        assert stand.router.answers_nobody
        stand.seconds += FIRST_OPEN_S
        assert not stand.router.answers_nobody


@EVERY_POLICY
async def test_requests_wait_while_all_are_open_and_serve_backs_off(policy: Balancing) -> None:
    async with standing(policy) as stand:
        stand.replicas("ab")
        stand.open("a", "b")
        tasks = [stand.send(stand.request(session="s", prompt="Once"))]
        await stand.settle()
        assert done(tasks) == []
        # Not at once: the first two times, and after each backoff.
        assert stand.backoffs >= 20
        assert stand.asked <= stand.backoffs + 2
        stand.seconds += FIRST_OPEN_S
        assert set(await placed(tasks)) <= {"a", "b"}


@EVERY_POLICY
async def test_a_half_open_replica_gets_exactly_one_of_many_waiting_requests(
    policy: Balancing,
) -> None:
    async with standing(policy) as stand:
        stand.replicas("a")
        stand.open("a")
        tasks = [stand.send(stand.request(session="s", prompt="Once")) for _ in range(5)]
        await stand.settle()
        stand.seconds += FIRST_OPEN_S
        await stand.settle()
        assert done(tasks) == ["a"]
        stand.breakers.replied("a")
        assert await placed(tasks) == ["a"] * 5


@EVERY_POLICY
async def test_the_next_trial_follows_when_serve_says_that_the_lease_is_over(
    policy: Balancing,
) -> None:
    async with standing(policy) as stand:
        replica = stand.replicas("a")["a"]
        stand.half_open("a")
        first = stand.request(session="s", prompt="Once")
        await placed([stand.send(first)])
        second = stand.send(stand.request(session="s", prompt="Once"))
        stand.router.on_request_completed(replica.replica_id, "another lease")
        await stand.settle()
        assert not second.done()
        lease = first.metadata.internal_request_id
        stand.router.on_request_completed(replica.replica_id, lease)
        assert await placed([second]) == ["a"]


@EVERY_POLICY
async def test_a_trial_that_fails_sends_nobody_after_it(policy: Balancing) -> None:
    async with standing(policy) as stand:
        stand.replicas("a")
        stand.half_open("a")
        tasks = [stand.send(stand.request(session="s", prompt="Once")) for _ in range(3)]
        await stand.settle()
        stand.breakers.fault("a")
        stand.seconds += FIRST_OPEN_S
        await stand.settle()
        assert done(tasks) == ["a"]
        stand.seconds += FIRST_OPEN_S
        await stand.settle()
        assert done(tasks) == ["a", "a"]


@EVERY_POLICY
async def test_a_breaker_that_opens_while_serve_asks_for_queues_is_heeded(
    policy: Balancing,
) -> None:
    async with standing(policy, cache=False) as stand:
        replicas = stand.replicas("a", queue=None)
        task = stand.send(stand.request(session="s"))
        while not replicas["a"].num_get_queue_len_calls > 1:
            await asyncio.sleep(0)
        stand.open("a")
        replicas["a"].set_queue_len_response(0)
        await stand.settle()
        assert not task.done()
        stand.replicas("ab")
        assert await placed([task]) == ["b"]


@EVERY_POLICY
async def test_a_client_that_left_while_all_were_open_takes_no_trial(policy: Balancing) -> None:
    async with standing(policy) as stand:
        stand.replicas("a")
        stand.open("a")
        left = stand.send(stand.request(session="s"))
        await stand.settle()
        left.cancel()
        stays = stand.send(stand.request(session="s"))
        await stand.settle()
        stand.seconds += FIRST_OPEN_S
        assert await placed([stays]) == ["a"]
        assert left.cancelled()


@EVERY_POLICY
async def test_a_full_replica_beside_an_open_one_is_waited_for(policy: Balancing) -> None:
    async with standing(policy) as stand:
        replicas = stand.replicas("ab", queue=10_000)
        stand.open("a")
        task = stand.send(stand.request(session="s", prompt="Once"))
        await stand.settle()
        assert not task.done()
        for each in replicas.values():
            each.set_queue_len_response(0)
        assert await placed([task]) == ["b"]


async def test_a_session_comes_back_to_its_replica_when_it_answers_again() -> None:
    async with standing("session-hash") as stand:
        stand.replicas("abc")
        home, *_ = await placed([stand.send(stand.request(session="s"))])
        stand.half_open(home)
        stand.open(home)
        stand.breakers.take(home, "somebody's trial")
        meanwhile = await placed([stand.send(stand.request(session="s")) for _ in range(5)])
        assert len(set(meanwhile)) == 1
        assert home not in meanwhile
        stand.breakers.replied(home)
        assert await placed([stand.send(stand.request(session="s"))]) == [home]


async def test_a_prompt_goes_elsewhere_while_the_replica_that_knows_it_is_open() -> None:
    async with standing("prefix-aware") as stand:
        replicas = stand.replicas("abc")
        prompt = "Once upon a time there was a replica"
        stand.router.on_request_routed(
            stand.request(prompt=prompt), replicas["b"].replica_id, result=None
        )
        assert await placed([stand.send(stand.request(prompt=prompt))]) == ["b"]
        stand.open("b")
        elsewhere = await placed([stand.send(stand.request(prompt=prompt)) for _ in range(10)])
        assert "b" not in elsewhere


async def test_an_open_replica_is_not_asked_for_its_queue_again_and_again() -> None:
    async with standing("prefix-aware", cache=False) as stand:
        replicas = stand.replicas("ab")
        while not replicas["a"].num_get_queue_len_calls:
            await asyncio.sleep(0)
        stand.open("a")
        await placed([stand.send(stand.request(prompt="Once")) for _ in range(10)])
        # Once, as a new one.
        assert replicas["a"].num_get_queue_len_calls == 1


async def test_every_router_of_this_process_heeds_the_same_breakers() -> None:
    made = [
        router(deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA)
        for router in REQUEST_ROUTERS.values()
    ]
    assert all(each.breakers is breakers for each in made)


@EVERY_POLICY
async def test_a_handle_keeps_our_router_when_serve_tells_it_the_deployments(
    policy: Balancing, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def create(
        handle_id: str, deployment_id: DeploymentID, options: Any, request_router_class: type
    ) -> Any:
        """Serve's own, without a controller that it would ask for replicas."""
        router = serves_router.CurrentLoopRouter(
            controller_handle=None,
            deployment_id=deployment_id,
            handle_id=handle_id,
            self_actor_id="",
            handle_source=options._source,
            request_router_class=request_router_class,
            enable_strict_max_ongoing_requests=True,
            node_id="node",
            availability_zone=None,
            prefer_local_node_routing=False,
        )
        made.append(router._asyncio_router)
        return router

    class Nothing:
        """For the clients that would poll the controller."""

        def __getattr__(self, name: str) -> Callable[..., Any]:
            return lambda *_, **__: Nothing()

    monkeypatch.setattr(request_routers, "create_router", create)
    monkeypatch.setattr(serves_router, "LongPollClient", lambda *_, **__: Nothing())
    monkeypatch.setattr(serves_router, "SharedRouterLongPollClient", Nothing())
    monkeypatch.setattr(ServeUsageTag, "record", lambda *_: None)
    with_tree = partialmethod(PrefixAware.initialize_state, tree_actor=LocalTree())
    monkeypatch.setattr(PrefixAware, "initialize_state", with_tree)
    handle = DeploymentHandle("engine", "engine-mtp", _create_router=routing_by(policy))
    handle._init(_source=DeploymentHandleSource.REPLICA)
    (inner,) = made
    inner.update_deployment_config(DeploymentConfig())
    inner.update_deployment_targets(DeploymentTargetInfo(is_available=True, running_replicas=[]))
    assert type(inner.request_router) is REQUEST_ROUTERS[policy]
    await inner.shutdown()


def test_serve_has_what_a_handle_is_given_its_router_by() -> None:
    create = inspect.signature(create_router)
    assert "request_router_class" in create.parameters
    assert "_create_router" in inspect.signature(DeploymentHandle).parameters
    assert "_source" in InitHandleOptions.__dataclass_fields__


def test_the_prefix_aware_router_finds_the_prompt_of_a_hint_that_crossed_processes() -> None:
    hint = pickle.loads(pickle.dumps(Hint(prompt="Once upon")))
    pending = PendingRequest(args=[hint], kwargs={}, metadata=None, future=None)
    assert object.__new__(PrefixAware)._extract_text_from_request(pending) == "Once upon"


def test_the_session_hash_router_looks_at_what_a_handles_option_sets() -> None:
    assert "session_id" in inspect.signature(DeploymentHandle.options).parameters
    options = DynamicHandleOptions().copy_and_update(session_id="s-1")
    pending = PendingRequest(args=[], kwargs={}, metadata=options, future=None)
    assert object.__new__(SessionHash)._routing_key(pending) == "s-1"


def test_what_a_gateway_imports_for_its_policies_brings_no_engine() -> None:
    program = """
import sys
import serving.gateway.request_routers
print([name for name in ("vllm", "torch", "transformers") if name in sys.modules])
"""
    command = [sys.executable, "-c", program]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines()[-1] == "[]"
