"""The bank's actor: its saving without Ray, and its restart in a small Ray of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from serving.stack.environment import ray_token
from serving.teams import actor as actor_module
from serving.teams.actor import QuotaBank
from serving.teams.database import open_database
from serving.teams.quota import TIMELESS, UNKNOWN, Ask, Charge, Report
from serving.teams.windows import LimitName

ROOT = Path(__file__).parents[3]


def report(number: int, *limits: LimitName) -> Report:
    asks = {
        limit: Ask(
            limit=100,
            window=UNKNOWN if limit == "tokens_per_day" else TIMELESS,
            held=0,
            change=0,
            idle=0,
            need=1,
            want=1,
        )
        for limit in limits
    }
    return Report("team:a", number, asks)


class SlowStore:
    """A store whose writes wait for `go`, and fail while `broken`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.broken = False
        self.charges: dict[str, Charge] = {}

    def load(self) -> Mapping[str, Charge]:
        return {}

    def save(self, charges: Mapping[str, Charge]) -> None:
        self.go.wait()
        if self.broken:
            raise OSError("disk full")
        self.charges |= charges


async def test_what_is_lent_is_in_the_store_before_the_gateway_has_it() -> None:
    store = SlowStore()
    bank = QuotaBank(lambda: store)
    lending = asyncio.create_task(bank.exchange("g", [report(1, "tokens_per_day")]))
    await asyncio.sleep(0.05)
    assert not lending.done()
    store.go.set()
    assert (await lending)[0]["tokens_per_day"].given == 1
    assert [charge.used for charge in store.charges.values()] == [1]


async def test_a_store_that_hangs_holds_up_no_limit_but_budgets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(actor_module, "SAVE_WITHIN_S", 0.01)
    store = SlowStore()
    bank = QuotaBank(lambda: store)
    answers = await bank.exchange("g", [report(1, "tokens_per_day", "requests_per_minute")])
    budget, minute = answers[0]["tokens_per_day"], answers[0]["requests_per_minute"]
    assert (budget.given, budget.booked) == (0, False)
    assert (minute.given, minute.booked) == (1, True)
    store.go.set()
    while not store.charges:
        await asyncio.sleep(0.01)


async def test_a_store_that_fails_is_tried_again_by_the_sweep(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(actor_module, "SWEEP_S", 0.01)
    store = SlowStore()
    store.broken = True
    store.go.set()
    bank = QuotaBank(lambda: store)
    answers = await bank.exchange("g", [report(1, "tokens_per_day")])
    assert not answers[0]["tokens_per_day"].booked
    await asyncio.sleep(0.05)
    assert logged == ["the quota store cannot be written: OSError('disk full')"]
    store.broken = False
    while not store.charges:
        await asyncio.sleep(0.01)
    answers = await bank.exchange("g", [report(2, "tokens_per_day")])
    assert answers[0]["tokens_per_day"].given == 1


RESTART = """
    import asyncio, os, time
    import ray
    from serving.teams.actor import ACTOR_NAME, quota_bank
    from serving.teams.caller import Caller, Limits
    from serving.teams.database import open_database
    from serving.teams.limiter import LimitedError, Limiter
    from serving.teams.quota_store import SqlQuotaStore

    def open_store():
        return SqlQuotaStore(open_database(os.environ["MOE_SERVING_DATABASE_URL"]))

    async def admitted(limiter, count):
        caller = Caller(
            "a", "k", frozenset(), None, None, Limits(tokens_per_day=100, concurrent_requests=50)
        )
        grants = await asyncio.gather(
            *(limiter.admit(caller, 10) for _ in range(count)), return_exceptions=True
        )
        good = [grant for grant in grants if not isinstance(grant, BaseException)]
        for grant in good:
            grant.close()
        return len(good), {type(grant) for grant in grants} - {type(g) for g in good}


    async def main():
        one, two = quota_bank(open_store, "test"), quota_bank(open_store, "test")
        # Gateways refuse until the actor has started.
        await one.usage("team:a")
        first, second = Limiter(one), Limiter(two)
        assert (await admitted(first, 3))[0] == 3
        assert (await admitted(second, 3))[0] == 3
        handle = ray.get_actor(ACTOR_NAME, namespace="test")
        ray.kill(handle, no_restart=False)
        deadline = time.monotonic() + 60
        count = 0
        while count < 4 and time.monotonic() < deadline:
            more, why = await admitted(first, 1)
            count += more
            await asyncio.sleep(0.2)
        assert count == 4, count
        more, why = await admitted(second, 5)
        assert (more, why) == (0, {LimitedError}), (more, why)
        usage = await one.usage("team:a")
        print("used", usage["tokens_per_day"].used, usage["concurrent_requests"].used)
        await first.close()
        await second.close()

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, namespace="test")
    try:
        asyncio.run(main())
    finally:
        ray.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_actor_that_is_killed_goes_on_from_the_store(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'teams.db'}"
    database = open_database(url)
    database.upgrade()
    database.close()
    environment = {
        **os.environ,
        # Ray would leave one in the user's home.
        **ray_token(tmp_path / "ray.token"),
        "PYTHONPATH": str(ROOT),
        "MOE_SERVING_DATABASE_URL": url,
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RESTART)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.splitlines()[-1] == "used 100 0"
