"""Waiting in asyncio: whatever ends a task, its slot or its place comes back."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from serving.gateway.admission import Admission, AdmissionMetrics, limits_of
from serving.gateway.fair_queue import (
    Counts,
    Limit,
    Limits,
    ModelLimits,
    Refused,
)
from serving.gateway.settings import GatewaySettings
from serving.router.request import Priority
from serving.router.settings import Bounds
from serving.router.table import ModelRoute, RoutingTable, VariantRoute
from tests.unit.gateway.test_fair_queue import GATEWAY, PLAIN, limits


def asking(
    admission: Admission, wait_s: float = 60.0, priority: Priority = "interactive", tenant: str = ""
) -> contextlib.AbstractAsyncContextManager[None]:
    return admission.slot("m", "plain", tokens=100, wait_s=wait_s, tenant=tenant, priority=priority)


async def hold(admission: Admission, until: asyncio.Event, wait_s: float = 60.0) -> str:
    """Run until the event comes; the result says that it came."""
    async with asking(admission, wait_s):
        await until.wait()
        return "served"


async def turns(times: int = 5) -> None:
    """Let the other tasks go on."""
    for _ in range(times):
        await asyncio.sleep(0)


def idle(admission: Admission) -> bool:
    return not admission._waiters and all(
        (counts.running, counts.queued) == (0, 0) for counts in admission.counts().values()
    )


async def test_a_free_slot_is_taken_without_giving_way_to_other_tasks() -> None:
    admission = Admission(limits(plain=Limit(1, 0)))
    seen: list[str] = []
    asyncio.get_running_loop().call_soon(seen.append, "another turn of the loop")
    async with asking(admission):
        assert admission.counts()[PLAIN].running == 1
        assert len(asyncio.all_tasks()) == 1
    assert seen == []
    assert idle(admission)


async def test_a_task_waits_for_its_turn_and_gives_the_slot_on() -> None:
    admission = Admission(limits(plain=Limit(1, 5)))
    ends = [asyncio.Event() for _ in range(3)]
    tasks = [asyncio.create_task(hold(admission, end)) for end in ends]
    await turns()
    assert admission.counts()[PLAIN] == Counts(1, 2, 1, {}, 0)
    for end in ends:
        end.set()
    assert await asyncio.gather(*tasks) == ["served"] * 3
    assert admission.counts()[PLAIN] == Counts(0, 0, 3, {}, 0)


async def test_a_waiting_task_is_refused_after_its_limit() -> None:
    admission = Admission(limits(plain=Limit(1, 5)))
    async with asking(admission):
        with pytest.raises(Refused) as caught:
            async with asking(admission, wait_s=0.01):
                pytest.fail("it has no slot")
        assert caught.value.reason == "waited"
    assert admission.counts()[PLAIN] == Counts(0, 0, 1, {"waited": 1}, 0)
    assert idle(admission)


async def test_a_task_that_finds_the_queue_full_is_refused_at_once() -> None:
    admission = Admission(limits(plain=Limit(1, 0)))
    async with asking(admission):
        with pytest.raises(Refused, match="full"):
            await asking(admission).__aenter__()
    assert idle(admission)


async def test_a_displaced_task_is_refused_and_the_other_waits_in_its_place() -> None:
    admission = Admission(limits(plain=Limit(1, 1)))
    end = asyncio.Event()
    running = asyncio.create_task(hold(admission, end))
    await turns()
    batch = asyncio.create_task(asking(admission, priority="batch").__aenter__())
    await turns()
    interactive = asyncio.create_task(hold(admission, end))
    with pytest.raises(Refused, match="displaced"):
        await batch
    end.set()
    assert set(await asyncio.gather(running, interactive)) == {"served"}
    assert idle(admission)


async def test_a_block_that_fails_gives_its_slot_back() -> None:
    admission = Admission(limits(plain=Limit(1, 0)))
    with pytest.raises(ZeroDivisionError):
        async with asking(admission):
            raise ZeroDivisionError
    assert idle(admission)


async def test_a_cancelled_task_gives_back_its_slot_or_its_place() -> None:
    admission = Admission(limits(plain=Limit(1, 5)))
    never = asyncio.Event()
    running, first, second = (asyncio.create_task(hold(admission, never)) for _ in range(3))
    await turns()
    first.cancel()
    await turns()
    assert admission.counts()[PLAIN] == Counts(1, 1, 1, {}, 1)
    running.cancel()
    await turns()
    assert admission.counts()[PLAIN] == Counts(1, 0, 2, {}, 1)
    second.cancel()
    await turns()
    assert idle(admission)


async def test_a_time_out_around_the_block_gives_back_the_place() -> None:
    admission = Admission(limits(plain=Limit(1, 5)))
    async with asking(admission):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), asking(admission):
                pytest.fail("it has no slot")
    assert idle(admission)


async def test_a_task_cancelled_between_its_turn_and_its_going_on_leaks_no_slot() -> None:
    admission = Admission(limits(plain=Limit(1, 5)))
    end, never = asyncio.Event(), asyncio.Event()
    block = asking(admission)
    await block.__aenter__()
    granted = asyncio.create_task(hold(admission, never))
    behind = asyncio.create_task(hold(admission, end))
    await turns()
    await block.__aexit__(None, None, None)
    # Its future has a result, and the task has not gone on.
    assert admission.counts()[PLAIN] == Counts(1, 1, 2, {}, 0)
    granted.cancel()
    await turns()
    assert granted.cancelled()
    assert admission.counts()[PLAIN] == Counts(1, 0, 3, {}, 0)
    end.set()
    assert await behind == "served"
    assert idle(admission)


async def test_a_turn_that_comes_to_a_task_just_cancelled_is_given_on() -> None:
    admission = Admission(limits(plain=Limit(1, 5)))
    end, never = asyncio.Event(), asyncio.Event()
    block = asking(admission)
    await block.__aenter__()
    cancelled = asyncio.create_task(hold(admission, never))
    behind = asyncio.create_task(hold(admission, end))
    await turns()
    cancelled.cancel()
    await block.__aexit__(None, None, None)
    await turns()
    end.set()
    assert await behind == "served"
    assert cancelled.cancelled() and idle(admission)


async def test_a_refusal_that_a_cancelled_task_never_sees_is_not_logged() -> None:
    admission = Admission(limits(plain=Limit(1, 1)))
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with asking(admission):
        batch = asyncio.create_task(asking(admission, priority="batch").__aenter__())
        await turns()
        interactive = asyncio.create_task(hold(admission, asyncio.Event()))
        await asyncio.sleep(0)
        batch.cancel()
        interactive.cancel()
        await turns()
        assert batch.cancelled()
        del batch
        gc.collect()
    assert complaints == []
    assert admission.counts()[PLAIN].refused == {"displaced": 1}
    assert idle(admission)


async def test_a_raised_limit_wakes_waiting_tasks() -> None:
    admission = Admission(limits(plain=Limit(0, 5)))
    end = asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, end)) for _ in range(2)]
    await turns()
    admission.set_limits(limits(plain=Limit(2, 5)))
    end.set()
    assert await asyncio.gather(*tasks) == ["served"] * 2


Act = tuple[str, int]
acts = st.lists(
    st.tuples(
        st.sampled_from(["send", "send late", "batch", "end", "fail", "cancel", "limit", "turn"]),
        st.integers(0, 11),
    ),
    max_size=40,
)


@given(acts)
@settings(max_examples=100, deadline=None)
def test_no_order_of_cancellations_ends_and_time_outs_loses_a_slot(script: list[Act]) -> None:
    asyncio.run(play(script))


async def play(script: list[Act]) -> None:
    """Play the acts; only `turn` lets tasks go on, so those between meet in the same turn."""
    admission = Admission(limits(plain=Limit(2, 3)))
    bound = 2
    most_running = arrived = 0
    ends: list[asyncio.Future[None]] = []
    tasks: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()
    complaints: list[object] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))

    async def request(end: asyncio.Future[None], wait_s: float, priority: Priority) -> None:
        nonlocal arrived
        arrived += 1
        async with asking(admission, wait_s, priority):
            await end

    for act, number in script:
        if act in ("send", "send late", "batch"):
            ends.append(loop.create_future())
            wait_s = 0.0 if act == "send late" else 60.0
            priority: Priority = "batch" if act == "batch" else "interactive"
            tasks.append(asyncio.create_task(request(ends[-1], wait_s, priority)))
        elif act == "turn":
            await turns(1 + number % 3)
        elif act == "limit":
            bound = number % 4
            most_running = admission.counts()[PLAIN].running
            admission.set_limits(limits(plain=Limit(bound, 3)))
        elif tasks:
            end, task = ends[number % len(ends)], tasks[number % len(tasks)]
            if act == "cancel":
                task.cancel()
            elif not end.done():
                if act == "end":
                    end.set_result(None)
                else:
                    end.set_exception(ZeroDivisionError())
                    end.exception()
        counts = admission.counts()[PLAIN]
        assert counts.running <= max(bound, most_running)
        assert counts.queued <= 3
        assert counts.running >= bound or counts.queued == 0
        most_running = counts.running

    admission.set_limits(limits())
    for end in ends:
        if not end.done():
            end.set_result(None)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    expected = (type(None), Refused, ZeroDivisionError, asyncio.CancelledError)
    assert all(isinstance(result, expected) for result in results)
    assert idle(admission)
    assert complaints == []
    counts = admission.counts()[GATEWAY]
    assert counts.admitted + sum(counts.refused.values()) + counts.abandoned == arrived


def settings_of(gateways: int = 1, **variant: int) -> GatewaySettings:
    route = VariantRoute(variant="plain", app_name="engine", max_model_len=64, slots=8, **variant)
    model = ModelRoute(
        id="m", default_variant="plain", variants=(route,), limits=Bounds(running=30, queued=60)
    )
    return GatewaySettings(
        table=RoutingTable(models=(model,)), limits=Bounds(queued=100), gateways=gateways
    )


@pytest.mark.parametrize(
    ("replicas", "settings", "expected"),
    [
        (2, settings_of(), Limit(16, 64)),
        (2, settings_of(max_queued=5), Limit(16, 5)),
        (2, settings_of(gateways=3, max_queued=5), Limit(6, 2)),
        # Its requests are refused, or wake it, by who knows why none runs.
        (0, settings_of(), Limit(8, 32)),
        (0, settings_of(may_grow_to=3), Limit(8, 32)),
        # Serve's autoscaler has to see who waits.
        (1, settings_of(may_grow_to=3), Limit(16, 64)),
        (3, settings_of(may_grow_to=3), Limit(24, 96)),
    ],
)
def test_a_variant_runs_what_its_replicas_have_slots_for(
    replicas: int, settings: GatewaySettings, expected: Limit
) -> None:
    limits = limits_of(settings, lambda route: replicas)
    assert limits.models["m"].variants == {"engine": expected}


def test_each_gateway_process_has_its_share_of_every_limit() -> None:
    limits = limits_of(settings_of(gateways=4), lambda route: 1)
    assert limits.gateway == Limit(None, 25)
    assert limits.models["m"].limit == Limit(8, 15)


async def test_the_counters_are_metrics_by_model_and_application() -> None:
    admission = Admission(Limits(models={"m": ModelLimits(variants={"engine": Limit(1, 0)})}))
    registry = CollectorRegistry()
    registry.register(AdmissionMetrics(admission))
    async with admission.slot("m", "engine", tokens=1, wait_s=1):
        with pytest.raises(Refused):
            async with admission.slot("m", "engine", tokens=1, wait_s=1):
                pass
        lines = generate_latest(registry).decode().splitlines()
    place = 'application="engine",model="m"'
    assert f"moe_serving_running{{{place}}} 1.0" in lines
    assert f"moe_serving_queued{{{place}}} 0.0" in lines
    assert f"moe_serving_admitted_total{{{place}}} 1.0" in lines
    assert f'moe_serving_refused_total{{{place},reason="full"}} 1.0' in lines
