"""A replica's server: one guarded app on two sockets, and a folder that nobody else enters."""

from __future__ import annotations

import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from serving.engines.keys import (
    ENGINE_KEY_HEADER,
    EngineKeyMiddleware,
    EngineKeys,
    Receive,
    Scope,
    Send,
)
from serving.engines.server import EngineServer


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers every HTTP request with its path."""
    if scope["type"] != "http":
        raise NotImplementedError
    body = scope["path"].encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def folder() -> Iterator[Path]:
    # tmp_path may be too long for a socket.
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[EngineServer]:
    guarded = EngineKeyMiddleware(app, EngineKeys(keys=("secret",)))
    server = EngineServer(guarded, "127.0.0.1", str(folder))
    await server.start()
    try:
        yield server
    finally:
        server.remove_socket()
        server.should_exit = True
        await server._task


def over(server: EngineServer, way: str) -> httpx.AsyncClient:
    """A client that reaches the server by TCP or by the unix socket."""
    if way == "tcp":
        return httpx.AsyncClient(base_url=server.url, trust_env=False, verify=False)
    transport = httpx.AsyncHTTPTransport(uds=server.socket_path, verify=False)
    return httpx.AsyncClient(base_url="http://engine", transport=transport, trust_env=False)


@pytest.mark.parametrize("way", ["tcp", "unix"])
async def test_both_ways_lead_to_the_app_and_both_demand_the_key(folder: Path, way: str) -> None:
    async with running(folder) as server, over(server, way) as client:
        assert (await client.post("/v1/completions")).status_code == 401
        wrong = {ENGINE_KEY_HEADER: "other"}
        assert (await client.post("/v1/completions", headers=wrong)).status_code == 401
        right = {ENGINE_KEY_HEADER: "secret"}
        reply = await client.post("/v1/completions", headers=right)
        assert (reply.status_code, reply.text) == (200, "/v1/completions")


async def test_the_socket_is_in_a_folder_that_its_owner_alone_enters(folder: Path) -> None:
    async with running(folder) as server:
        assert server.socket_path is not None
        path = Path(server.socket_path)
        assert path.parent.parent == folder
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert path.is_socket()
    assert list(folder.iterdir()) == []


async def test_what_a_killed_replica_left_is_not_in_the_way_of_the_next(folder: Path) -> None:
    async with running(folder) as first, running(folder) as second:
        assert first.socket_path != second.socket_path
        assert first.url != second.url


async def test_without_a_unix_socket_the_port_serves_alone(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = folder / ("x" * 100)
    long.mkdir()
    async with running(long) as server, over(server, "tcp") as client:
        assert server.socket_path is None
        assert (await client.post("/v1/completions")).status_code == 401
    assert "no unix socket at " in caplog.text
