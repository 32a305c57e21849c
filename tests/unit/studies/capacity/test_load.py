"""The load on a real mock engine, and through the bare relay; failures end it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from serving.engines.lease import Endpoint
from serving.stack.environment import free_port
from serving.studies.capacity import mock
from serving.studies.capacity.client import (
    Latency,
    Load,
    LoadError,
    LoadSettings,
    latency,
    percentile,
    run_load,
)
from serving.studies.capacity.relay import NODE, BareRelay


def settings(port: int, **changes: Any) -> LoadSettings:
    values: dict[str, Any] = {
        "url": f"http://127.0.0.1:{port}",
        "connections": 4,
        "chunks": 5,
        "pause_ms": 1,
        "stream": True,
        "warm_up_s": 0.05,
        "seconds": 0.3,
        "seed": 0,
    }
    return LoadSettings(**values | changes)


@contextlib.asynccontextmanager
async def engine(folder: Path) -> AsyncIterator[tuple[int, str]]:
    """A mock engine's port and socket."""
    port, socket = free_port(), str(folder / "s")
    task = asyncio.create_task(mock.serve(port, socket))
    while not Path(socket).exists():
        await asyncio.sleep(0.01)
    try:
        yield port, socket
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def answering(reply: bytes) -> AsyncIterator[int]:
    """A port that answers whatever comes with these bytes and hangs up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(reply)
        writer.close()

    port = free_port()
    async with await asyncio.start_server(answer, "127.0.0.1", port):
        yield port


@pytest.mark.parametrize("pause_ms", [0, 1])
async def test_streams_are_counted_event_by_event(tmp_path: Path, pause_ms: int) -> None:
    async with engine(tmp_path) as (port, _):
        load = await run_load(settings(port, pause_ms=pause_ms))
    # Those that began before the window or end after it are parts.
    assert abs(load.chunks - 6 * load.requests) <= 4 * 6
    assert load.requests >= 4


async def test_whole_replies_have_no_chunks(tmp_path: Path) -> None:
    async with engine(tmp_path) as (port, _):
        load = await run_load(settings(port, stream=False))
    assert (load.chunks, load.requests >= 4) == (0, True)


async def test_a_stream_takes_as_long_as_its_pauses(tmp_path: Path) -> None:
    async with engine(tmp_path) as (port, _):
        load = await run_load(settings(port, pause_ms=20, seconds=0.5))
    assert load.total.p50_ms >= 4 * 20 - 1


@pytest.mark.parametrize("stream", [True, False])
async def test_the_bare_relay_passes_everything_on(tmp_path: Path, stream: bool) -> None:
    async with engine(tmp_path) as (port, socket):
        relay = BareRelay(Endpoint(f"http://127.0.0.1:{port}", "mock", "", NODE, socket))
        own = free_port()
        config = uvicorn.Config(
            relay, host="127.0.0.1", port=own, lifespan="off", log_level="warning"
        )
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        load = await run_load(settings(own, stream=stream))
        server.should_exit = True
        await task
    assert load.requests >= 4


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        (b"HTTP/1.1 503 no\r\ncontent-length: 4\r\n\r\nfull", "status 503: full"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\ndata: 1\n", "after 1 of 6 events"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\ndata: 1\n", "the connection was closed"),
        (b"nonsense\r\n\r\n", "the reply is no HTTP"),
    ],
)
async def test_a_failed_request_ends_the_load(reply: bytes, complaint: str) -> None:
    async with answering(reply) as port:
        with pytest.raises(LoadError, match=complaint):
            await run_load(settings(port, connections=1))


async def test_nobody_listening_is_said() -> None:
    with pytest.raises(LoadError, match="no connection to"):
        await run_load(settings(free_port()))


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(each) for each in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (50.0, 99.0)
    assert percentile([7.0], 0.99) == 7.0
    assert latency([0.001, 0.002, 0.003]) == Latency(p50_ms=2.0, p99_ms=3.0)


def test_a_load_survives_the_way_to_its_parent() -> None:
    load = Load(
        seconds=1.0,
        requests=2,
        chunks=3,
        ttfb=Latency(p50_ms=1.0, p99_ms=2.0),
        total=Latency(p50_ms=3.0, p99_ms=4.0),
        client_cpu_s=0.5,
    )
    assert Load.model_validate_json(load.model_dump_json()) == load
