"""The fake server of the studies' tests, and the load tests' own modules."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from serving.stack.environment import free_port

ROOT = Path(__file__).parents[3]
LOADTESTS = ROOT / "loadtests"
FAKE = ROOT / "tests" / "unit" / "studies" / "fake_server.py"
READY_WITHIN_S = 30


@pytest.fixture
def fake() -> Iterator[Callable[..., str]]:
    """Starts a fake server with the given arguments; returns its address, and ends it."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> str:
        port = free_port()
        started.append(subprocess.Popen([sys.executable, str(FAKE), str(port), *arguments]))
        host = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + READY_WITHIN_S
        while not answers(host):
            assert started[-1].poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        return host

    yield start
    for process in started:
        process.terminate()
        process.wait(timeout=10)


def answers(host: str) -> bool:
    try:
        with urllib.request.urlopen(f"{host}/v1/models", timeout=1):
            return True
    except urllib.error.URLError:
        return False


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a file of loadtests/ the way Locust does, with its folder in front."""
    monkeypatch.syspath_prepend(str(LOADTESTS))
    return importlib.import_module
