"""A small server with the shape of OpenAI's API, as a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serving.stack.environment import free_port
from serving.studies.overhead.servers import Server

FAKE = Path(__file__).with_name("fake_server.py")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts a fake server under a name, and ends all of them after the test."""
    started: list[Server] = []

    def start_one(name: str, *arguments: str) -> Server:
        port = free_port()
        command = [sys.executable, str(FAKE), str(port), *arguments]
        server = Server(name, port, command, {}, tmp_path / name)
        started.append(server)
        server.start()
        server.wait_until_ready("tiny")
        return server

    yield start_one
    for server in started:
        server.stop()
        assert server.processes() == []
