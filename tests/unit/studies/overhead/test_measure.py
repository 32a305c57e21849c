"""Rounds against two small servers, each a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from serving.studies.overhead import measure, servers
from serving.studies.overhead.measure import rotated, run_rounds
from serving.studies.overhead.processes import Kind
from serving.studies.overhead.servers import Server, ServerError

Start = Callable[..., Server]


def test_each_round_measures_each_server_under_each_load(start: Start) -> None:
    pair = [start(servers.BARE), start(servers.STACK)]
    lines: list[str] = []
    measured = asyncio.run(run_rounds(pair, "tiny", (1, 2), 2, lines.append))

    order = [(reading.round, reading.streams, reading.server) for reading in measured.readings]
    assert order == [
        (0, 1, "bare"),
        (0, 1, "stack"),
        (0, 2, "bare"),
        (0, 2, "stack"),
        (1, 1, "stack"),
        (1, 1, "bare"),
        (1, 2, "stack"),
        (1, 2, "bare"),
    ]
    assert {reading.tokens for reading in measured.readings} == {
        measure.MIN_REQUESTS * measure.MAX_TOKENS
    }
    assert all(set(reading.cpu_s) == {Kind.OTHER} for reading in measured.readings)
    counts = [(each.server, each.round, len(each.seconds)) for each in measured.one_token]
    assert counts == [("bare", 0, 40), ("stack", 0, 40), ("bare", 1, 40), ("stack", 1, 40)]
    assert lines[0].startswith("round 1 of 2: bare, 1 streams: ")


def test_a_request_that_fails_ends_the_comparison(start: Start) -> None:
    server = start(servers.BARE, "5")
    with pytest.raises(ServerError, match=r"\(out of order \(HTTP 500\)\)") as told:
        asyncio.run(run_rounds([server], "tiny", (2,), 1, lambda _: None))
    assert str(told.value).startswith(f"{servers.LABELS[servers.BARE]} failed a request")


def test_every_server_is_first_equally_often() -> None:
    names = ["a", "b", "c"]
    orders = [rotated(names, number) for number in range(3)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
