"""A lease is held exactly as long as the request that carries its id."""

from __future__ import annotations

import asyncio
import contextlib

from serving.engines.lease import LeaseBook

NEVER_S = 3600.0


async def let_others_run() -> None:
    """Give every ready task a few turns of the event loop, without waiting for a clock."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_lease_ends_when_its_request_ends() -> None:
    book = LeaseBook(start_within_s=NEVER_S)
    lease_id = book.grant()
    waiting = asyncio.create_task(book.wait_until_ended(lease_id))
    await let_others_run()
    book.request_started(lease_id)
    await let_others_run()
    assert (waiting.done(), book.open_count) == (False, 1)

    book.request_ended(lease_id)
    await waiting
    assert book.open_count == 0


async def test_a_lease_whose_request_never_starts_ends_by_itself() -> None:
    book = LeaseBook(start_within_s=0.0)
    await book.wait_until_ended(book.grant())
    assert book.open_count == 0


async def test_a_started_request_may_outlast_the_time_given_to_start() -> None:
    book = LeaseBook(start_within_s=0.01)
    lease_id = book.grant()
    waiting = asyncio.create_task(book.wait_until_ended(lease_id))
    book.request_started(lease_id)
    await asyncio.wait({waiting}, timeout=0.05)
    assert (waiting.done(), book.open_count) == (False, 1)

    book.request_ended(lease_id)
    await waiting
    assert book.open_count == 0


async def test_a_request_that_ends_before_anyone_waits_frees_its_lease() -> None:
    book = LeaseBook(start_within_s=NEVER_S)
    lease_id = book.grant()
    book.request_started(lease_id)
    book.request_ended(lease_id)
    await book.wait_until_ended(lease_id)
    assert book.open_count == 0


async def test_cancelling_the_wait_before_the_start_closes_the_lease() -> None:
    book = LeaseBook(start_within_s=NEVER_S)
    waiting = asyncio.create_task(book.wait_until_ended(book.grant()))
    await let_others_run()
    await cancel(waiting)
    assert (waiting.cancelled(), book.open_count) == (True, 0)


async def test_cancelling_the_wait_during_the_request_closes_the_lease() -> None:
    book = LeaseBook(start_within_s=NEVER_S)
    lease_id = book.grant()
    waiting = asyncio.create_task(book.wait_until_ended(lease_id))
    book.request_started(lease_id)
    await let_others_run()
    await cancel(waiting)
    assert (waiting.cancelled(), book.open_count) == (True, 0)


async def test_the_end_of_one_request_leaves_other_leases_open() -> None:
    book = LeaseBook(start_within_s=NEVER_S)
    first, second = book.grant(), book.grant()
    assert first != second
    book.request_ended(first)
    await book.wait_until_ended(first)
    assert book.open_count == 1


async def test_unknown_lease_ids_are_ignored() -> None:
    book = LeaseBook(start_within_s=NEVER_S)
    lease_id = book.grant()
    waiting = asyncio.create_task(book.wait_until_ended(lease_id))
    book.request_started("of another replica")
    book.request_ended("of another replica")
    await let_others_run()
    assert (waiting.done(), book.open_count) == (False, 1)
    await cancel(waiting)


async def test_news_of_a_lease_that_has_ended_is_ignored() -> None:
    book = LeaseBook(start_within_s=0.0)
    lease_id = book.grant()
    await book.wait_until_ended(lease_id)
    book.request_started(lease_id)
    book.request_ended(lease_id)
    assert book.open_count == 0


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
