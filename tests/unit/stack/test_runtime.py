"""Own processes are found and ended, others never; ports and the state folder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from serving.stack import history, runtime
from serving.stack.environment import MARK
from serving.stack.load import load_stack
from serving.stack.runtime import Run, RuntimeFailure

SLEEPER = "import signal, time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(runtime.HOME_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def start() -> Iterator[object]:
    started: list[subprocess.Popen[str]] = []

    def sleeper(mark: Path | str | None, program: str = SLEEPER) -> subprocess.Popen[str]:
        environment = {**os.environ} | ({} if mark is None else {MARK: str(mark)})
        process = subprocess.Popen(
            [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    yield sleeper
    for process in started:
        process.kill()
        process.communicate()


def a_run(temp: Path) -> Run:
    return Run(
        stack="demo",
        address="127.0.0.1:9",
        url="http://127.0.0.1:8000",
        temp=str(temp),
        started=1.0,
        port_option=None,
        ray_up=True,
        ready=True,
        stopping=False,
        environment={},
    )


def test_only_processes_with_this_folder_s_mark_are_own(home: Path, start) -> None:  # type: ignore[no-untyped-def]
    mine, other, unmarked = start(home), start(home / "other"), start(None)
    pids = [process.pid for process in runtime.own_processes()]
    assert mine.pid in pids
    assert not {other.pid, unmarked.pid, os.getpid()} & set(pids)


def test_ending_leaves_others_alone_and_forgets_the_run(home: Path, start) -> None:  # type: ignore[no-untyped-def]
    mine, other, unmarked = start(home), start(home / "other"), start(None)
    temp = home / "ray"
    temp.mkdir()
    runtime.note(a_run(temp))
    assert runtime.end_processes() == 1
    assert not psutil.pid_exists(mine.pid)
    assert (other.poll(), unmarked.poll()) == (None, None)
    assert runtime.running() is None
    assert not temp.exists()


def test_a_process_that_ignores_sigterm_is_killed(
    home: Path,
    start,  # type: ignore[no-untyped-def]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "TERMINATE_WITHIN_S", 0.2)
    stubborn = start(home, STUBBORN)
    assert runtime.end_processes() == 1
    assert not psutil.pid_exists(stubborn.pid)


def test_shared_memory_is_freed_once_no_own_process_maps_it(home: Path, start) -> None:  # type: ignore[no-untyped-def]
    block = shared_memory.SharedMemory(create=True, size=4096)
    path = Path("/dev/shm") / block.name
    maps = (
        "from multiprocessing import shared_memory, resource_tracker as r; "
        f"m = shared_memory.SharedMemory({block.name!r}); r.unregister(m._name, 'shared_memory'); "
    )
    try:
        mine = start(home, maps + SLEEPER)
        before = runtime.shared_memory()
        assert before == {path}
        runtime.drop_shared_memory(before)
        assert path.exists()
        mine.kill()
        mine.wait()
        runtime.drop_shared_memory(before)
        assert not path.exists()
    finally:
        block.close()
        path.touch()
        block.unlink()


def test_ending_with_nothing_there_is_no_error() -> None:
    assert runtime.end_processes() == 0


def test_what_was_noted_is_read_back_and_a_broken_note_is_none(home: Path) -> None:
    runtime.note(a_run(home))
    assert runtime.running() == a_run(home)
    assert (home / "run.json").stat().st_mode & 0o077 == 0
    (home / "run.json").write_text("{")
    assert runtime.running() is None


def test_an_end_is_announced_to_whoever_waits(home: Path) -> None:
    runtime.mark_stopping()
    assert runtime.running() is None
    runtime.note(a_run(home))
    runtime.mark_stopping()
    assert runtime.running() == a_run(home) | {"stopping": True}


def test_a_second_up_at_the_same_time_is_refused() -> None:
    refused = pytest.raises(RuntimeFailure, match=r"^another moe-serving up is starting")
    with runtime.exclusive(), refused, runtime.exclusive():
        pass
    with runtime.exclusive():
        pass


def test_a_taken_port_is_told_with_its_owner_and_the_cure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        problem = runtime.port_problem("127.0.0.1", port)
        assert problem is not None
        assert problem.startswith(f"gateway.port: {port} is taken by ")
        assert problem.endswith(
            f" (process {os.getpid()}); end it, or choose another port with --port"
        )
    assert runtime.port_problem("127.0.0.1", port) is None


def test_an_address_of_another_machine_is_told_as_the_host_s_fault() -> None:
    problem = runtime.port_problem("192.0.2.1", 8000)
    assert problem is not None
    assert problem.startswith("gateway.host: 192.0.2.1 cannot be listened on (")


def test_ray_answers_only_while_something_listens(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        accept = threading.Thread(target=server.accept)
        accept.start()
        run = a_run(home)
        run["address"] = address
        assert runtime.ray_answers(run)
        accept.join()
    assert not runtime.ray_answers(run)


def test_the_url_is_https_with_tls_and_local_for_every_address(tmp_path: Path) -> None:
    demo = load_stack("demo")
    assert runtime.url_of(demo) == "http://127.0.0.1:8000"
    tls = {"cert_file": tmp_path / "c", "key_file": tmp_path / "k"}
    gateway = demo.gateway.model_copy(update={"host": "0.0.0.0", "tls": tls})
    assert runtime.url_of(demo.model_copy(update={"gateway": gateway})) == "https://127.0.0.1:8000"


def test_the_stack_before_the_current_one_is_kept_and_swaps_on_every_step() -> None:
    one, two = load_stack("demo"), load_stack("demo-two-models")
    history.begin(one)
    assert (history.current(), history.previous()) == (one, None)
    history.advance(two)
    assert (history.current(), history.previous()) == (two, one)
    history.advance(one)
    assert (history.current(), history.previous()) == (one, two)
    history.begin(two)
    assert (history.current(), history.previous()) == (two, None)


@pytest.mark.parametrize("name", ["demo", "h100x2-35b-fp8", "2x-rtx3090-35b-int4"])
def test_a_stack_reads_back_from_json_as_it_was(name: str) -> None:
    stack = load_stack(name)
    assert history.from_json(history.to_json(stack)) == stack
