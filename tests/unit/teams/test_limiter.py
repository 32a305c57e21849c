"""Limiters of several gateways on one bank, in virtual time (`quota_world`)."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.teams.borrowing import Holding
from serving.teams.caller import Caller, Limits
from serving.teams.limiter import (
    RECALL_WITHIN_S,
    LimitedError,
    Limiter,
    LimiterUnavailableError,
)
from serving.teams.quota import BEAT_S, LEASE_S, TIMELESS, Answer, Answers, Report
from serving.teams.windows import CELL_S, MINUTE_S, RULE_OF
from tests.unit.teams.quota_world import MIDNIGHT, World, in_virtual_time

DAY_S = 86_400.0


def run(
    story: Callable[[World], Awaitable[None]],
    gateways: int = 1,
    delay: Callable[[], float] = lambda: 0.001,
    b: Limits | None = None,
    **limits: int,
) -> None:
    """Run a story in a world whose team `a` has these limits, and `b` those (or none)."""

    async def main() -> None:
        world = World(gateways, {"a": Limits(**limits), "b": b or Limits()}, delay)
        await story(world)
        world.kill_bank()
        assert world.exceeded == []

    in_virtual_time(main())


async def admitted(world: World, gateway: int, count: int, team: str = "a") -> int:
    """How many of `count` requests at once are admitted; they end at once."""
    tries = [world.admit(gateway, team) for _ in range(count)]
    grants = await asyncio.gather(*tries, return_exceptions=True)
    good = [grant for grant in grants if not isinstance(grant, BaseException)]
    for grant in good:
        grant.close()
    return len(good)


def test_a_caller_without_limits_costs_no_call() -> None:
    async def story(world: World) -> None:
        grant = await world.admit(0, "b", 10**9)
        grant.settle(1, 1)
        await asyncio.sleep(10)
        assert (world.gateways[0].link.calls, grant.headers) == ([], {})

    run(story)


def test_most_requests_need_no_call() -> None:
    async def story(world: World) -> None:
        for _ in range(2000):
            (await world.admit(0, "a", 100)).settle(10, 10)
            await asyncio.sleep(0.01)
        passed_s = world.now.mono
        assert len(world.gateways[0].link.calls) < 2 * passed_s / BEAT_S + 20

    run(story, requests_per_minute=5000, tokens_per_minute=10**6, concurrent_requests=20)


def test_the_limit_of_a_minute_holds_and_all_of_it_can_be_used() -> None:
    async def story(world: World) -> None:
        assert await admitted(world, 0, 30) == 10
        await asyncio.sleep(MINUTE_S + CELL_S + BEAT_S)
        assert await admitted(world, 0, 30) == 10

    run(story, requests_per_minute=10)


def test_the_limits_of_team_and_key_hold_both() -> None:
    async def story(world: World) -> None:
        limits = Limits(requests_per_minute=3)
        one = Caller("a", "k1", frozenset(), None, None, world.limits["a"], limits)
        two = Caller("a", "k2", frozenset(), None, None, world.limits["a"], limits)
        limiter = world.gateways[0].limiter
        for _ in range(3):
            (await limiter.admit(one, 1)).close()
        with pytest.raises(LimitedError, match="the key 'k1', requests_per_minute = 3"):
            await limiter.admit(one, 1)
        (await limiter.admit(two, 1)).close()
        with pytest.raises(LimitedError, match="the team 'a', requests_per_minute = 4"):
            await limiter.admit(two, 1)

    run(story, requests_per_minute=4)


def test_a_refusal_says_which_limit_and_when_to_come_again() -> None:
    async def story(world: World) -> None:
        (await world.admit(0, "a", 100)).close()
        await asyncio.sleep(10)
        (await world.admit(0, "a", 200)).close()
        await asyncio.sleep(10)
        with pytest.raises(LimitedError) as refusal:
            await world.admit(0, "a", 50)
        error = refusal.value
        assert (error.limit, error.units) == ("tokens_per_minute", 340)
        assert error.headers == {
            "x-ratelimit-limit-requests": "60",
            "x-ratelimit-remaining-requests": "58",
            "x-ratelimit-reset-requests": "51s",
            "x-ratelimit-limit-tokens": "340",
            "x-ratelimit-remaining-tokens": "40",
            "x-ratelimit-reset-tokens": "51s",
        }
        assert error.retry_after_s is not None
        assert str(error) == (
            "the limit of the team 'a', tokens_per_minute = 340 is reached; retry in 41 s"
        )
        await asyncio.sleep(error.retry_after_s)
        (await world.admit(0, "a", 50)).close()

    run(story, requests_per_minute=60, tokens_per_minute=340)


def test_a_used_up_budget_is_not_retried_by_clients_themselves() -> None:
    async def story(world: World) -> None:
        world.wall = MIDNIGHT + DAY_S - 1000
        (await world.admit(0, "a", 100)).close()
        with pytest.raises(LimitedError) as refusal:
            await world.admit(0, "a", 1)
        error = refusal.value
        assert error.limit == "tokens_per_day"
        assert error.headers["x-should-retry"] == "false"
        assert error.retry_after_s is not None
        await asyncio.sleep(error.retry_after_s)
        (await world.admit(0, "a", 100)).close()

    run(story, tokens_per_day=100)


def test_a_request_above_the_whole_limit_is_told_so() -> None:
    async def story(world: World) -> None:
        with pytest.raises(LimitedError, match="lower max_tokens or shorten the prompt") as refusal:
            await world.admit(0, "a", 101)
        assert refusal.value.retry_after_s is None
        assert refusal.value.headers["x-should-retry"] == "false"

    run(story, tokens_per_minute=100)


def test_tokens_that_were_reserved_and_not_used_come_back() -> None:
    async def story(world: World) -> None:
        grant = await world.admit(0, "a", 100)
        with pytest.raises(LimitedError):
            await world.admit(0, "a", 1)
        grant.settle(prompt_tokens=10, output_tokens=20)
        await asyncio.sleep(BEAT_S)
        (await world.admit(0, "a", 70)).close()
        await asyncio.sleep(BEAT_S)
        with pytest.raises(LimitedError):
            await world.admit(0, "a", 1)

    run(story, tokens_per_minute=100, tokens_per_day=100)


def test_tokens_beyond_the_reservation_are_booked_on_every_gateway() -> None:
    async def story(world: World) -> None:
        (await world.admit(0, "a", 10)).settle(10, 140)
        await asyncio.sleep(3 * BEAT_S)
        for gateway in (0, 1):
            with pytest.raises(LimitedError):
                await world.admit(gateway, "a", 1)
        await asyncio.sleep(MINUTE_S + CELL_S + BEAT_S)
        (await world.admit(1, "a", 100)).close()

    run(story, gateways=2, tokens_per_minute=100)


def test_settling_twice_has_no_effect() -> None:
    async def story(world: World) -> None:
        grant = await world.admit(0, "a", 100)
        grant.settle(40, 10)
        grant.settle(0, 0)
        grant.close()
        await asyncio.sleep(2 * BEAT_S)
        (await world.admit(0, "a", 50)).close()
        assert await admitted(world, 0, 3) == 0
        assert world.bank is not None
        assert (await world.bank.usage("team:a"))["concurrent_requests"].used == 0

    run(story, tokens_per_day=100, concurrent_requests=2)


def test_a_cut_request_is_charged_what_was_noted_of_it() -> None:
    async def story(world: World) -> None:
        with pytest.raises(ConnectionError), await world.admit(0, "a", 100) as grant:
            grant.note(10, 5)
            grant.note(10, 20)
            raise ConnectionError
        await asyncio.sleep(2 * BEAT_S)
        (await world.admit(0, "a", 70)).close()
        assert await admitted(world, 0, 1) == 0

    run(story, tokens_per_day=100)


def test_a_cut_request_of_which_nothing_is_known_is_charged_what_it_reserved() -> None:
    async def story(world: World) -> None:
        with await world.admit(0, "a", 100):
            pass
        await asyncio.sleep(2 * BEAT_S)
        assert await admitted(world, 0, 1) == 0

    run(story, tokens_per_day=100)


def test_a_request_that_is_cancelled_while_it_asks_leaves_nothing_taken() -> None:
    async def story(world: World) -> None:
        for wait_s in (0.005, 0.015, 0.025):
            request = asyncio.ensure_future(world.admit(0, "a"))
            await asyncio.sleep(wait_s)
            request.cancel()
            await asyncio.wait({request})
            if not request.cancelled():
                request.result().close()
        await asyncio.sleep(10)
        assert world.bank is not None
        assert (await world.bank.usage("team:a"))["concurrent_requests"].used == 0
        assert await admitted(world, 0, 9) == 2

    run(story, delay=lambda: 0.01, concurrent_requests=2)


def test_a_unit_that_is_idle_elsewhere_is_fetched_before_a_request_is_refused() -> None:
    async def story(world: World) -> None:
        grants = [await world.admit(0, "a") for _ in range(8)]
        for grant in grants[:6]:
            grant.close()
        # Until its next beat nobody knows what a gateway has idle.
        await asyncio.sleep(1.1 * BEAT_S)
        began = world.now.mono
        others = await asyncio.gather(*(world.admit(1, "a") for _ in range(6)))
        assert world.now.mono - began < RECALL_WITHIN_S
        for grant in [*grants, *others]:
            grant.close()

    run(story, gateways=2, concurrent_requests=8)


def test_a_flood_over_the_limit_is_refused_with_few_calls() -> None:
    async def story(world: World) -> None:
        await admitted(world, 0, 10)
        before, began = len(world.gateways[0].link.calls), world.now.mono
        for _ in range(1000):
            assert await admitted(world, 0, 5) == 0
            await asyncio.sleep(0.002)
        passed_s = world.now.mono - began
        assert len(world.gateways[0].link.calls) - before < 8 * passed_s

    run(story, requests_per_minute=10)


def test_a_team_at_its_limit_costs_another_no_time() -> None:
    times: list[list[float]] = []

    async def story(world: World) -> None:
        seen = []
        for step in range(200):
            if len(times) == 1:
                for gateway in (0, 1):
                    for _ in range(5):
                        world.send(gateway, "a", 1, 1, 0.3)
            began = world.now.mono
            with await world.admit(step % 2, "b", 10):
                seen.append(world.now.mono - began)
                await asyncio.sleep(0.01)
        times.append(seen)
        await world.settle_down()

    for _ in range(2):
        run(
            story,
            gateways=2,
            b=Limits(requests_per_minute=1000, concurrent_requests=10),
            requests_per_minute=20,
            concurrent_requests=2,
        )
    without, beside = times
    assert sum(beside) <= sum(without) * 1.01


class OneHangs:
    """A lender that never answers a team's own questions."""

    def __init__(self, world: World, subject: str) -> None:
        self._world = world
        self._subject = subject

    async def exchange(self, gateway: str, reports: list[Report]) -> list[Answers]:
        if [report.subject for report in reports] == [self._subject]:
            await asyncio.sleep(3600)
        assert self._world.bank is not None
        return await self._world.bank.exchange(gateway, reports)


def test_a_team_that_waits_for_the_bank_does_not_hold_up_another() -> None:
    async def story(world: World) -> None:
        limiter = Limiter(OneHangs(world, "team:a"), clock=asyncio.get_running_loop().time)
        hanging = [asyncio.ensure_future(limiter.admit(world.caller("a"), 1)) for _ in range(5)]
        await asyncio.sleep(0.001)
        began = world.now.mono
        (await limiter.admit(world.caller("b"), 1)).close()
        assert world.now.mono == began
        assert not any(task.done() for task in hanging)
        for task in hanging:
            task.cancel()
        await asyncio.wait(hanging)
        await limiter.close()

    run(story, b=Limits(requests_per_minute=10), requests_per_minute=10)


def test_without_the_bank_a_gateway_goes_on_with_what_it_holds_and_then_refuses() -> None:
    async def story(world: World) -> None:
        for _ in range(40):
            (await world.admit(0, "a")).close()
            await asyncio.sleep(0.05)
        world.kill_bank()
        (await world.admit(0, "a")).close()
        await asyncio.sleep(LEASE_S)
        with pytest.raises(LimiterUnavailableError, match="the team 'a' cannot be checked now"):
            await world.admit(0, "a")
        (await world.admit(0, "b")).close()
        world.start_bank()
        await asyncio.sleep(2 * BEAT_S)
        (await world.admit(0, "a")).close()

    run(story, requests_per_minute=1000)


def test_a_restart_of_the_bank_neither_forgets_nor_doubles() -> None:
    async def story(world: World) -> None:
        running = [await world.admit(step % 2, "a", 10) for step in range(6)]
        world.kill_bank()
        await asyncio.sleep(3)
        world.start_bank()
        await asyncio.sleep(3 * BEAT_S)
        assert world.bank is not None
        usage = await world.bank.usage("team:a")
        assert {name: each.used for name, each in usage.items()} == {
            "concurrent_requests": 6,
            "requests_per_minute": 6,
            "tokens_per_day": 60,
        }
        assert await admitted(world, 0, 10) == 4
        for grant in running:
            grant.settle(1, 1)

    run(story, gateways=2, concurrent_requests=10, requests_per_minute=20, tokens_per_day=1000)


def test_where_the_store_cannot_be_written_only_budgets_refuse() -> None:
    async def story(world: World) -> None:
        (await world.admit(0, "b")).close()
        world.store.broken = True
        with pytest.raises(LimiterUnavailableError):
            await world.admit(0, "a", 10)
        (await world.admit(0, "b")).close()
        assert await admitted(world, 0, 100, "b") == 98
        world.store.broken = False
        await asyncio.sleep(6)
        (await world.admit(0, "a", 100)).close()

    run(story, b=Limits(requests_per_minute=100), tokens_per_day=100)


def test_a_store_that_is_back_is_noticed_though_there_is_nothing_to_write() -> None:
    async def story(world: World) -> None:
        await asyncio.sleep(1)
        world.store.broken = True
        (await world.admit(0, "b")).close()
        await asyncio.sleep(12)
        world.store.broken = False
        await asyncio.sleep(6)
        (await world.admit(0, "a", 10)).close()

    run(story, b=Limits(concurrent_requests=1), tokens_per_day=100)


def test_a_store_that_cannot_be_read_yet_is_read_when_it_can() -> None:
    async def story(world: World) -> None:
        world.store.broken = True
        with pytest.raises(LimiterUnavailableError):
            await world.admit(0, "a", 10)
        world.store.broken = False
        await asyncio.sleep(2 * BEAT_S)
        (await world.admit(0, "a", 10)).close()

    run(story, tokens_per_day=100)


def test_a_gateway_that_closes_gives_back_what_is_idle() -> None:
    async def story(world: World) -> None:
        (await world.admit(0, "a", 10)).close()
        await world.gateways[0].limiter.close()
        (await world.admit(1, "a", 90)).close()

    run(story, gateways=2, tokens_per_day=100)


def test_a_gateway_that_is_gone_frees_its_slots_after_its_lease() -> None:
    async def story(world: World) -> None:
        for _ in range(3):
            world.send(0, "a", 1, 1, 3600)
        await asyncio.sleep(1)
        world.kill_gateway(0)
        assert await admitted(world, 1, 5) == 0
        await asyncio.sleep(LEASE_S + BEAT_S)
        assert await admitted(world, 1, 5) == 3

    run(story, gateways=2, concurrent_requests=3)


def test_a_limit_takes_its_new_value_on_every_gateway() -> None:
    async def story(world: World) -> None:
        assert await admitted(world, 0, 4) == 4
        world.limits = {"a": Limits(requests_per_minute=6)}
        assert await admitted(world, 0, 9) + await admitted(world, 1, 9) == 2
        world.limits = {"a": Limits(requests_per_minute=8)}
        await asyncio.sleep(1)
        assert await admitted(world, 1, 9) + await admitted(world, 0, 9) == 2

    run(story, gateways=2, requests_per_minute=100)


def test_what_a_lowered_limit_gave_back_is_not_used_before_the_bank_has_answered() -> None:
    holding = Holding(RULE_OF["requests_per_minute"])
    holding.limit = 10
    ask = holding.ask(0.0, need=10)
    lent = Answer(10, TIMELESS, math.inf, free=0, recall=False, coming=False, retry_after_s=0.0)
    holding.hear(ask, lent, sent=0.0, now=0.0)
    holding.limit = 4
    assert holding.ask(1.0).change == -6
    # The answer is lost, so that the bank may have lent the six to others.
    holding.limit = 10
    assert holding.idle(2.0) == 4
    ask = holding.ask(2.0)
    assert (ask.held, ask.change) == (10, -6)


def test_a_gateway_forgets_a_team_of_which_it_holds_nothing() -> None:
    async def story(world: World) -> None:
        (await world.admit(0, "a", 50)).settle(5, 5)
        await asyncio.sleep(2 * MINUTE_S)
        calls = len(world.gateways[0].link.calls)
        await asyncio.sleep(MINUTE_S)
        assert len(world.gateways[0].link.calls) == calls
        (await world.admit(0, "a", 90)).close()
        assert await admitted(world, 0, 1) == 0

    run(story, requests_per_minute=10, concurrent_requests=3, tokens_per_day=100)


def test_a_day_ends_at_midnight_and_a_late_request_is_charged_to_its_own() -> None:
    async def story(world: World) -> None:
        world.wall = MIDNIGHT + DAY_S - 100
        grant = await world.admit(0, "a", 100)
        await asyncio.sleep(101)
        (await world.admit(0, "a", 100)).close()
        grant.settle(0, 1)
        await asyncio.sleep(2 * BEAT_S)
        assert await admitted(world, 0, 1) == 0

    run(story, tokens_per_day=100)


# --- whatever happens ----------------------------------------------------------------------

gateways = st.integers(0, 2)
teams = st.sampled_from("ab")
waits = st.floats(0, 30)
sending = st.tuples(
    st.just("send"),
    gateways,
    teams,
    st.integers(1, 12),
    st.integers(1, 40),
    st.integers(-1, 40),
    st.sampled_from([0.0, 0.01, 0.4, 5.0, 50.0]),
)
waiting = st.tuples(st.just("wait"), waits)
breaking = st.one_of(
    st.tuples(st.just("gateway dies"), gateways),
    st.tuples(st.just("gateway is cut off"), gateways, st.floats(0, LEASE_S - 1)),
    st.tuples(st.just("answers are lost"), gateways, st.integers(1, 3)),
    st.tuples(st.just("requests are cancelled"), gateways),
    st.tuples(st.just("bank restarts"), st.floats(0, 10)),
    st.tuples(st.just("clock steps"), st.floats(-2 * DAY_S, 2 * DAY_S)),
    st.tuples(st.just("store breaks"), st.floats(0, 10)),
)
LIMITS = {
    "a": Limits(
        concurrent_requests=5, requests_per_minute=12, tokens_per_minute=150, tokens_per_day=600
    ),
    "b": Limits(concurrent_requests=2, tokens_per_minute=100, tokens_per_month=10**6),
}


async def happen(world: World, event: tuple[object, ...]) -> None:
    match event:
        case ("send", int(gateway), str(team), int(count), int(tokens), int(used), float(lasts)):
            for _ in range(count):
                world.send(gateway, team, tokens, min(used, tokens), lasts)
        case ("wait", float(seconds)):
            await asyncio.sleep(seconds)
        case ("gateway dies", int(gateway)):
            world.kill_gateway(gateway)
        case ("gateway is cut off", int(gateway), float(seconds)):
            link = world.gateways[gateway].link
            link.cut = True
            await asyncio.sleep(seconds)
            link.cut = False
        case ("answers are lost", int(gateway), int(count)):
            world.gateways[gateway].link.lose_answers = count
        case ("requests are cancelled", int(gateway)):
            for task in list(world.gateways[gateway].tasks):
                task.cancel()
        case ("bank restarts", float(seconds)):
            world.kill_bank()
            await asyncio.sleep(seconds)
            world.start_bank()
        case ("clock steps", float(seconds)):
            world.wall += seconds
        case ("store breaks", float(seconds)):
            world.store.broken = True
            await asyncio.sleep(seconds)
            world.store.broken = False
            # Until the store has everything, a restart would forget.
            await asyncio.sleep(6)


@settings(max_examples=30, deadline=None)
@given(
    events=st.lists(st.one_of(sending, sending, waiting, breaking), min_size=1, max_size=30),
    seed=st.integers(0, 2**32),
)
def test_whatever_happens_no_limit_is_exceeded_and_all_slots_come_back(
    events: list[tuple[object, ...]], seed: int
) -> None:
    chance = random.Random(seed)

    async def story(world: World) -> None:
        # `run` looks at every admission.
        for event in events:
            await happen(world, event)
        for gateway in world.gateways:
            gateway.link.lose_answers = 0
        await world.settle_down()
        await asyncio.sleep(LEASE_S + MINUTE_S + CELL_S + 35)
        assert world.bank is not None
        for team in "ab":
            usage = await world.bank.usage(f"team:{team}")
            lasting = {"tokens_per_day", "tokens_per_month"}
            assert not any(each.used for name, each in usage.items() if name not in lasting)
        assert await admitted(world, chance.randrange(3), 9, "b") == 2

    run(
        story,
        gateways=3,
        delay=lambda: chance.choice([0.0, 0.001, 0.1, 0.4]),
        b=LIMITS["b"],
        **LIMITS["a"].model_dump(exclude_none=True),
    )


@settings(max_examples=20, deadline=None)
@given(
    events=st.lists(st.one_of(sending, waiting), min_size=1, max_size=12),
    gateway=gateways,
    team=teams,
)
def test_nobody_is_refused_what_has_been_idle_for_a_moment(
    events: list[tuple[object, ...]], gateway: int, team: str
) -> None:
    async def story(world: World) -> None:
        for event in events:
            await happen(world, event)
        # Requests that wait have their turn, and gateways report what they have done.
        await asyncio.sleep(RECALL_WITHIN_S + 2 * BEAT_S)
        used = world.used(team, within_s=MINUTE_S + CELL_S + 2 * BEAT_S)
        limits = LIMITS[team].model_dump(exclude_none=True)
        left = min(limit - used.get(name, 0) for name, limit in limits.items() if "tokens" in name)
        slots = [limit - used[name] for name, limit in limits.items() if "requests" in name]
        if left > 0 and min(slots) > 0:
            (await world.admit(gateway, team, left)).close()
        await world.settle_down()

    run(story, gateways=3, b=LIMITS["b"], **LIMITS["a"].model_dump(exclude_none=True))
