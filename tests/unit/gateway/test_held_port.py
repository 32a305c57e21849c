"""The clients' port, held open while HAProxy comes and goes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from serving.gateway import held_port
from serving.stack.environment import free_port
from tests.unit.gateway.harness import PATIENCE_S


@pytest.mark.parametrize("host", ["127.0.0.1", "*", "::1", "::"])
def test_the_same_socket_is_given_to_all_who_ask(tmp_path: Path, host: str) -> None:
    port, place = free_port(), tmp_path / "port"
    assert held_port.take(place) is None
    first = held_port.listen(f"{host}:{port}", place)
    (holder,) = psutil.Process().children()
    try:
        second = held_port.take(place)
        assert second is not None
        assert os.fstat(first).st_ino == os.fstat(second).st_ino
        os.close(first)
        address = "::1" if ":" in host else "127.0.0.1"
        with (
            socket.create_connection((address, port), timeout=PATIENCE_S),
            socket.socket(fileno=second) as listener,
        ):
            listener.settimeout(PATIENCE_S)
            listener.accept()[0].close()
    finally:
        holder.kill()
        holder.wait(timeout=PATIENCE_S)
    assert held_port.take(place) is None


def test_the_holder_ends_when_nobody_uses_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_port, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(held_port, "UNUSED_FOR_S", 0.1)
    place = tmp_path / "port"
    user = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with socket.socket(socket.AF_UNIX) as server, socket.create_server(("127.0.0.1", 0)) as port:
        server.bind(str(place))
        server.listen()
        with ThreadPoolExecutor(1) as threads:
            holding = threads.submit(held_port.hold, port.fileno(), server, user.pid)
            descriptor = held_port.take(place)
            assert descriptor is not None
            os.close(descriptor)
            user.communicate(b"\n", timeout=PATIENCE_S)
            # This process asked, too, and goes on.
            with pytest.raises(TimeoutError):
                holding.result(timeout=0.5)
            monkeypatch.setattr(held_port, "UNUSED_FOR_S", -1.0)
            holding.result(timeout=PATIENCE_S)
