"""A lease is held as long as requests that carry its id come one after the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from serving.engines.lease import LeaseBook

NEVER_S = 3600.0


def book_of(start_within_s: float = NEVER_S, kept_for_s: float = 0.0) -> LeaseBook:
    """A book that keeps no lease for another request, unless told so."""
    return LeaseBook(start_within_s, kept_for_s)


async def replica(book: LeaseBook) -> AsyncIterator[str]:
    """What a replica does for one lease."""
    with book.granted() as lease_id:
        yield lease_id
        await book.wait_until_ended(lease_id)


async def leased(book: LeaseBook) -> tuple[str, asyncio.Task[None]]:
    """A lease that was given to a gateway, and the replica's wait for its end."""
    stream = replica(book)
    lease_id = await anext(stream)

    async def rest() -> None:
        async for _ in stream:
            raise AssertionError("a lease is one endpoint")

    return lease_id, asyncio.create_task(rest())


async def let_others_run() -> None:
    """Give every ready task a few turns of the event loop, without waiting for a clock."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_lease_ends_when_its_request_ends() -> None:
    book = book_of()
    lease_id, waiting = await leased(book)
    await let_others_run()
    assert (book.open_count, book.running_count) == (1, 0)
    book.request_started(lease_id)
    await let_others_run()
    assert (waiting.done(), book.open_count, book.running_count) == (False, 1, 1)

    book.request_ended(lease_id)
    assert book.running_count == 0
    await waiting
    assert book.open_count == 0


async def test_a_lease_whose_request_never_starts_ends_by_itself() -> None:
    book = book_of(start_within_s=0.0)
    _, waiting = await leased(book)
    await waiting
    assert book.open_count == 0


async def test_a_started_request_may_outlast_the_time_given_to_start() -> None:
    book = book_of(start_within_s=0.01)
    lease_id, waiting = await leased(book)
    book.request_started(lease_id)
    await asyncio.wait({waiting}, timeout=0.05)
    assert (waiting.done(), book.open_count) == (False, 1)

    book.request_ended(lease_id)
    await waiting
    assert book.open_count == 0


async def test_a_lease_is_open_for_the_next_request_until_none_came_in_time() -> None:
    book = book_of(kept_for_s=0.05)
    lease_id, waiting = await leased(book)
    for _ in range(3):
        book.request_started(lease_id)
        await let_others_run()
        book.request_ended(lease_id)
        await let_others_run()
        assert (waiting.done(), book.open_count, book.running_count) == (False, 1, 0)
    await waiting
    assert book.open_count == 0


async def test_a_request_may_begin_before_the_end_of_the_last_is_known() -> None:
    book = book_of()
    lease_id, waiting = await leased(book)
    book.request_started(lease_id)
    book.request_started(lease_id)
    book.request_ended(lease_id)
    await asyncio.wait({waiting}, timeout=0.02)
    assert (waiting.done(), book.running_count) == (False, 1)

    book.request_ended(lease_id)
    await waiting
    assert book.open_count == 0


async def test_a_request_that_ends_before_anyone_waits_frees_its_lease() -> None:
    book = book_of()
    lease_id, waiting = await leased(book)
    book.request_started(lease_id)
    book.request_ended(lease_id)
    await waiting
    assert book.open_count == 0


async def test_a_lease_that_is_given_back_before_anyone_waits_is_closed() -> None:
    book = book_of()
    stream = replica(book)
    await anext(stream)
    assert book.open_count == 1
    del stream
    await let_others_run()
    assert book.open_count == 0


@pytest.mark.parametrize("started", [False, True])
async def test_cancelling_the_wait_closes_the_lease(started: bool) -> None:
    book = book_of()
    lease_id, waiting = await leased(book)
    if started:
        book.request_started(lease_id)
    await let_others_run()
    await cancel(waiting)
    assert (waiting.cancelled(), book.open_count) == (True, 0)


async def test_the_end_of_one_request_leaves_other_leases_open() -> None:
    book = book_of()
    (first, ended), (second, going_on) = await leased(book), await leased(book)
    assert first != second
    book.request_started(first)
    book.request_ended(first)
    await ended
    assert (going_on.done(), book.open_count) == (False, 1)
    await cancel(going_on)


async def test_unknown_lease_ids_are_ignored() -> None:
    book = book_of()
    _, waiting = await leased(book)
    book.request_started("of another replica")
    book.request_ended("of another replica")
    await let_others_run()
    assert (waiting.done(), book.open_count) == (False, 1)
    await cancel(waiting)


async def test_news_of_a_lease_that_has_ended_is_ignored() -> None:
    book = book_of(start_within_s=0.0)
    lease_id, waiting = await leased(book)
    await waiting
    book.request_started(lease_id)
    book.request_ended(lease_id)
    assert book.open_count == 0


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
