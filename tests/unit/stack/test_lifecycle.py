"""The command's side of starting, changing and ending, with a driver that only plays its part."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from serving.stack import history, lifecycle, runtime
from serving.stack.environment import MARK
from serving.stack.events import Failure, Outcome, Step
from serving.stack.load import load_stack
from serving.stack.runtime import RuntimeFailure
from serving.stack.spec import StackSpec

ONE, TWO = load_stack("demo"), load_stack("demo-two-models")
SWITCHED = Step(name="gateway", step="ready").model_dump_json()
DONE = Outcome(text="engines: 1 started").model_dump_json()
FAILED = Failure(text="m@plain did not start: ValueError: x").model_dump_json()
# Reads the request as the real one does, then says its lines.
SAYS = "import sys; sys.stdin.readline(); sys.stdout.write({!r}); sys.stdout.flush()"

Play = Callable[..., None]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(runtime.HOME_VARIABLE, str(tmp_path))
    monkeypatch.setattr(runtime, "start_ray", lambda run: None)
    monkeypatch.setattr(lifecycle, "gateway_ready", lambda run: (True, ""))
    monkeypatch.setattr(runtime, "ray_answers", lambda run: True)
    return tmp_path


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    def set_lines(*lines: str, then: str = "") -> None:
        program = SAYS.format("".join(f"{line}\n" for line in lines)) + f"\n{then}"
        monkeypatch.setattr(lifecycle, "DRIVER", (sys.executable, "-c", program))

    return set_lines


@pytest.fixture
def engine(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with the stack's mark, as Ray's and the engines' have it."""
    environment = {**os.environ, MARK: str(home)}
    program = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    process = subprocess.Popen(program, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def with_free_port(stack: StackSpec) -> StackSpec:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return lifecycle.with_port(stack, server.getsockname()[1])


def up(stack: StackSpec) -> lifecycle.Up:
    return lifecycle.up(stack, None, Console(quiet=True))


def begin(stack: StackSpec) -> None:
    """A stack that runs, as `up` leaves it."""
    run = runtime.prepare(stack, None)
    run["ray_up"] = run["ready"] = True
    runtime.note(run)
    history.begin(stack)


def test_a_stack_that_came_up_is_noted_as_ready(play: Play) -> None:
    play(SWITCHED, DONE)
    stack = with_free_port(ONE)
    assert up(stack).started_here
    run = runtime.running()
    assert run is not None
    assert (run["ready"], run["url"]) == (True, runtime.url_of(stack))
    assert (history.current(), history.previous()) == (stack, None)


def test_a_stack_that_failed_leaves_nothing_and_names_the_log(play: Play) -> None:
    play(FAILED)
    with pytest.raises(RuntimeFailure) as caught:
        up(with_free_port(ONE))
    assert str(caught.value) == (
        f"m@plain did not start: ValueError: x\nAll that was printed is in {runtime.log_file()}"
    )
    assert runtime.running() is None


def test_a_driver_that_dies_is_told_as_such(play: Play) -> None:
    play(then="sys.exit(3)")
    with pytest.raises(RuntimeFailure, match=r"ended without a word; .*up\.log has what"):
        up(with_free_port(ONE))


def test_leftovers_are_named_with_their_cure(engine: subprocess.Popen[bytes]) -> None:
    with pytest.raises(RuntimeFailure) as caught:
        up(with_free_port(ONE))
    name = psutil.Process(engine.pid).name()
    assert str(caught.value) == (
        f"processes of an earlier run are in the way ({name} {engine.pid}); "
        "`moe-serving down` ends them"
    )
    assert lifecycle.end(Console(quiet=True)) == 1


def test_a_change_becomes_the_current_stack_and_going_back_twice_returns(
    play: Play, engine: subprocess.Popen[bytes]
) -> None:
    begin(ONE)
    play(SWITCHED, DONE)
    assert up(TWO) == lifecycle.Up(runtime.url_of(ONE), False, "engines: 1 started")
    assert (history.current(), history.previous()) == (TWO, ONE)
    lifecycle.roll_back(Console(quiet=True))
    assert (history.current(), history.previous()) == (ONE, TWO)
    lifecycle.roll_back(Console(quiet=True))
    assert (history.current(), history.previous()) == (TWO, ONE)


def test_a_change_that_failed_leaves_the_stack_and_its_history(
    play: Play, engine: subprocess.Popen[bytes]
) -> None:
    begin(ONE)
    play(FAILED)
    with pytest.raises(RuntimeFailure, match=r"^m@plain did not start"):
        up(TWO)
    assert (history.current(), history.previous()) == (ONE, None)
    assert engine.poll() is None
    assert runtime.running() is not None


def test_the_port_option_of_the_start_holds_for_changes(
    play: Play, engine: subprocess.Popen[bytes]
) -> None:
    begin(lifecycle.with_port(ONE, 9123))
    run = runtime.running()
    assert run is not None
    run["port_option"] = 9123
    runtime.note(run)
    play(SWITCHED, DONE)
    up(TWO)
    current = history.current()
    assert current is not None
    assert current.gateway.port == 9123


def test_an_interrupted_start_ends_the_driver_and_forgets_the_run(play: Play) -> None:
    play(SWITCHED, then="import time; time.sleep(600)")

    def interrupt(_: object) -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    # A shell that runs the tests in the background has SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(runtime, "start_ray", interrupt)
            up(with_free_port(ONE))
    finally:
        signal.signal(signal.SIGINT, before)
    assert runtime.running() is None
    assert runtime.own_processes() == []


def test_whoever_waits_hears_that_another_command_ended_the_stack(home: Path) -> None:
    begin(ONE)
    run = runtime.running()
    assert run is not None
    runtime.mark_stopping()
    assert lifecycle.wait_until_ended(run["started"])


def test_whoever_waits_hears_that_ray_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    begin(ONE)
    run = runtime.running()
    assert run is not None
    monkeypatch.setattr(runtime, "ray_answers", lambda run: False)
    assert not lifecycle.wait_until_ended(run["started"])


@pytest.mark.parametrize(
    ("variants", "serves"),
    [
        ({"m@mtp": "unfit", "m@plain": "running"}, True),
        ({"m@mtp": "unfit", "m@plain": "idle"}, True),
        ({"m@mtp": "unfit"}, False),
        ({"m@mtp": "unfit", "m@plain": "deploying"}, False),
        ({}, False),
    ],
)
def test_a_stack_serves_without_a_variant_that_failed_its_probe(
    home: Path,
    play: Play,
    monkeypatch: pytest.MonkeyPatch,
    variants: dict[str, str],
    serves: bool,
) -> None:
    answer = json.dumps({"ready": False, "variants": variants})
    monkeypatch.setattr(lifecycle, "gateway_ready", lambda run: (False, answer))
    monkeypatch.setattr(lifecycle, "REACHABLE_WITHIN_S", 0.0)
    play(SWITCHED, DONE)
    if serves:
        assert up(with_free_port(ONE)).started_here
    else:
        with pytest.raises(RuntimeFailure, match="/readyz does not say ready"):
            up(with_free_port(ONE))
