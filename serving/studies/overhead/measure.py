"""The interleaved rounds: the same load on every server, one after the other.

Owns the load, its order and what is read from each server. Leaves starting servers
to `servers`, and condensing the values to `report`.

Each stream sends its requests one after another, as the next user would; the client
runs in this process, whose CPU time is not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from serving.studies.client import ApiFailureError, Client, Result
from serving.studies.overhead import processes
from serving.studies.overhead.processes import Kind
from serving.studies.overhead.servers import Server, ServerError

T = TypeVar("T")

MAX_TOKENS = 256
REQUESTS_PER_STREAM = 2
# A single stream would else be over before CPU time, counted in 10 ms, says anything.
MIN_REQUESTS = 4
WARM_UP_REQUESTS = 3
ONE_TOKEN_REQUESTS = 40

# Greedy and never ended early, so that every server does the same work.
SAMPLING = {"temperature": 0, "ignore_eos": True}

PROMPTS = (
    "def add(a, b):",
    "import os\n\n\ndef walk(top):",
    "class Stack:\n    def __init__(self):",
    "def fibonacci(n):\n    if n < 2:",
    "from collections import deque\n\n\nclass Queue:",
    "def read_lines(path):\n    with open(path) as file:",
    "try:\n    value = int(text)\nexcept ValueError:",
    "def test_empty(self):\n    self.assertEqual(",
    "async def fetch(session, url):",
    "for name, value in sorted(items.items()):",
    "def parse(argv=None):\n    parser = argparse.ArgumentParser(",
    "class Node:\n    __slots__ = (",
    "def merge(left, right):\n    result = []",
    "if __name__ == '__main__':",
    "def __repr__(self):\n    return",
    "while True:\n    line = stream.readline()",
)


@dataclass(frozen=True, slots=True)
class Reading:
    """One server under one load in one round."""

    server: str
    streams: int
    round: int
    tokens: int
    """Completion tokens, by the server's `usage`."""
    seconds: float
    ttft_s: float
    """Median over the requests."""
    tpot_s: float
    """Median over the requests."""
    cpu_s: dict[Kind, float]
    """CPU seconds by kind of process."""


@dataclass(frozen=True, slots=True)
class OneToken:
    """Seconds that each one-token request took, sent one by one on an idle server."""

    server: str
    round: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """All rounds."""

    readings: tuple[Reading, ...]
    one_token: tuple[OneToken, ...]


async def run_rounds(
    servers: Sequence[Server],
    model: str,
    streams: Sequence[int],
    rounds: int,
    report: Callable[[str], None],
) -> Measured:
    """Warm every server up, then measure all of them in each round.

    Needs every server ready. `report` gets a line per step. Raises ServerError for the
    first request that fails, with the server's last lines: a comparison with failures is none.
    """
    for server in servers:
        for count in sorted({1, *streams}):
            await _load(server, model, count, WARM_UP_REQUESTS * count)
    readings: list[Reading] = []
    one_token: list[OneToken] = []
    for number in range(rounds):
        for count, server in itertools.product(streams, rotated(servers, number)):
            readings.append(await _reading(server, model, count, number))
            report(f"round {number + 1} of {rounds}: {described(readings[-1])}")
        one_token += await _one_token(servers, model, number)
    return Measured(tuple(readings), tuple(one_token))


def rotated(servers: Sequence[T], number: int) -> list[T]:
    """The order of round `number`: each server is first, second, ... equally often."""
    shift = number % len(servers)
    return [*servers[shift:], *servers[:shift]]


def described(reading: Reading) -> str:
    """One line for the progress report."""
    rate = reading.tokens / reading.seconds
    return f"{reading.server}, {reading.streams} streams: {rate:.0f} tokens/s"


async def _reading(server: Server, model: str, streams: int, number: int) -> Reading:
    own = server.processes()
    before = processes.cpu_seconds(own)
    began = time.perf_counter()
    results = await _load(server, model, streams, max(REQUESTS_PER_STREAM * streams, MIN_REQUESTS))
    seconds = time.perf_counter() - began
    after = processes.cpu_seconds(own)
    return Reading(
        server=server.name,
        streams=streams,
        round=number,
        tokens=sum(result.completion_tokens for result in results),
        seconds=seconds,
        ttft_s=statistics.median(result.ttft_s for result in results),
        tpot_s=statistics.median(result.tpot_s for result in results),
        cpu_s=processes.spent(before, after),
    )


async def _load(server: Server, model: str, streams: int, requests: int) -> list[Result]:
    prompts = itertools.islice(itertools.cycle(PROMPTS), requests)
    results: list[Result] = []
    try:
        async with Client(server.url) as client, asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(_one_stream(client, model, prompts, results))
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
        if isinstance(first, ApiFailureError):
            raise ServerError(server.failure(f"failed a request ({first})")) from None
        raise first from None
    return results


async def _one_stream(
    client: Client, model: str, prompts: Iterator[str], results: list[Result]
) -> None:
    for prompt in prompts:
        stream = client.completion(model, prompt, max_tokens=MAX_TOKENS, **SAMPLING)
        async for _ in stream:
            pass
        results.append(stream.result)


async def _one_token(servers: Sequence[Server], model: str, number: int) -> list[OneToken]:
    seconds: dict[str, list[float]] = {server.name: [] for server in servers}
    async with contextlib.AsyncExitStack() as opened:
        clients = {
            server.name: await opened.enter_async_context(Client(server.url)) for server in servers
        }
        # The first opens the connection, which a client keeps; it is not counted.
        for turn in range(ONE_TOKEN_REQUESTS + 1):
            prompt = PROMPTS[turn % len(PROMPTS)]
            for name, client in clients.items():
                took = await client.one_reply(model, prompt, max_tokens=1, **SAMPLING)
                if turn:
                    seconds[name].append(took)
    return [OneToken(name, number, tuple(values)) for name, values in seconds.items()]
