"""Bringing a stack up, changing it and ending it, from the command's side.

Owns the order of things and what happens when one of them fails or a person
interrupts. Ray and Serve are spoken to by a `driver` process; nothing here
imports them.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console

from serving.signals import handled
from serving.stack import history, runtime
from serving.stack.events import (
    EVENT,
    READY,
    STARTING,
    Event,
    Failure,
    Outcome,
    Request,
    Status,
    Step,
)
from serving.stack.progress import Progress
from serving.stack.runtime import Run, RuntimeFailure
from serving.stack.spec import StackSpec

# An ordered end: the driver's own start, the engines' last requests, Serve's shutdown.
END_WITHIN_S = 20.0
ENGINES_END_WITHIN_S = 8.0
# An interrupted update puts everything back before it goes.
UNDO_WITHIN_S = 20.0
# HAProxy learns of a new gateway within a turn of Serve's control loop.
REACHABLE_WITHIN_S = 30.0
# Words of /readyz for a variant.
ANSWERING = frozenset({"running", "idle", "starting"})
UNFIT = "unfit"
LOOK_EVERY_S = 1.0
DRIVER = (sys.executable, "-m", "serving.stack.driver")
RAY, SERVE = "Ray", "Ray Serve"


@dataclass(frozen=True, slots=True)
class Up:
    """A stack that runs: where, and whether this command started it."""

    url: str
    started_here: bool
    text: str


def up(stack: StackSpec, port_option: int | None, console: Console) -> Up:
    """Bring the stack up, or change the one that runs into it.

    Raises RuntimeFailure with the reason and the cure; then nothing is left of a
    stack that did not come up, and a stack that ran before runs as it did.
    """
    with runtime.exclusive():
        run = _running_stack()
        if run is None:
            return _bring_up(stack, port_option, console)
        if port_option is None and run["port_option"] is not None:
            stack = with_port(stack, run["port_option"])
        return _update(run, stack, console)


def roll_back(console: Console) -> Up:
    """Go back to the stack before the current one; again, and the current one is back."""
    with runtime.exclusive():
        run = _running_stack()
        if run is None:
            raise RuntimeFailure("no stack runs; `moe-serving up STACK` starts one")
        before = history.previous()
        if before is None:
            raise RuntimeFailure(
                "there is nothing to go back to: this stack has not been changed since it was "
                "started; change it with `moe-serving up STACK`"
            )
        return _update(run, before, console)


def with_port(stack: StackSpec, port: int) -> StackSpec:
    """The stack with --port over its file's gateway.port."""
    return stack.model_copy(update={"gateway": stack.gateway.model_copy(update={"port": port})})


def wait_until_ended(started: float) -> bool:
    """Return when the run begun at `started` is over: whether another command ended it."""
    while True:
        run = runtime.running()
        if run is None or run["started"] != started or run["stopping"]:
            return True
        if not runtime.ray_answers(run):
            return False
        time.sleep(LOOK_EVERY_S)


def status(console: Console) -> tuple[Run, Status]:
    """What runs; raises RuntimeFailure where nothing does."""
    run, stack = _running_stack(also_starting=True), history.current()
    if run is None or stack is None:
        raise RuntimeFailure("no stack runs; `moe-serving up STACK` starts one")
    with console.status("asking Ray Serve"), _Driver("status", run) as driver:
        driver.send(Request(address=run["address"], stack=history.to_json(stack)))
        event = driver.follow(lambda _: None)
    if not isinstance(event, Status):
        raise RuntimeFailure(_told(event))
    return run, event


def gateway_ready(run: Run) -> tuple[bool, str]:
    """Whether /readyz says yes, and what it says otherwise."""
    try:
        # The certificate's name is the clients' business; this asks the machine itself.
        reply = httpx.get(f"{run['url']}/readyz", timeout=5, verify=False, trust_env=False)
    except httpx.HTTPError as error:
        return False, f"no answer: {str(error) or type(error).__name__}"
    return reply.status_code == httpx.codes.OK, reply.text


def end(console: Console) -> int:
    """End the stack in order, then whatever is left; returns how many processes there were.

    Takes no longer than about half a minute, and cannot be interrupted.
    """
    with _uninterrupted():
        run = runtime.running()
        before, memory = len(runtime.own_processes()), runtime.shared_memory()
        runtime.mark_stopping()
        if run is not None and run["ray_up"] and before and runtime.ray_answers(run):
            with console.status("ending: gateway, engines, Ray Serve, Ray"):
                _end_applications(run)
        count = max(before, runtime.end_processes())
        runtime.drop_shared_memory(memory)
        return count


# --- up from nothing ----------------------------------------------------------------------


def _running_stack(*, also_starting: bool = False) -> Run | None:
    """The run that serves now, None where nothing is there; raises where leftovers are."""
    run, processes = runtime.running(), runtime.own_processes()
    if not processes:
        return None
    if run is not None and runtime.ray_answers(run) and (run["ready"] or also_starting):
        return run
    raise RuntimeFailure(
        "processes of an earlier run are in the way "
        f"({runtime.describe(processes)}); `moe-serving down` ends them"
    )


def _bring_up(stack: StackSpec, port_option: int | None, console: Console) -> Up:
    gateway = stack.gateway
    if problem := runtime.port_problem(gateway.host, gateway.port):
        raise RuntimeFailure(problem)
    for path in (gateway.tls.cert_file, gateway.tls.key_file) if gateway.tls else ():
        _check_readable(path)
    _check_keys(stack)
    with _ended_unless_done(console), Progress(console) as progress:
        run = runtime.prepare(stack, port_option)
        history.begin(stack)
        with _Driver("start", run, end_within_s=2) as driver:
            progress.show(Step(name=RAY, step=STARTING))
            progress.show(Step(name=SERVE, step="loading"))
            runtime.start_ray(run)
            progress.show(Step(name=RAY, step=READY))
            run["ray_up"] = True
            runtime.note(run)
            request = Request(
                address=run["address"], temp=run["temp"], stack=history.to_json(stack)
            )
            driver.send(request)
            outcome = _succeeded(driver.follow(_showing(progress)))
        _wait_until_reachable(run)
        run["ready"] = True
        runtime.note(run)
    return Up(run["url"], started_here=True, text=outcome.text)


def _check_keys(stack: StackSpec) -> None:
    """Raises RuntimeFailure where the stack needs keys and the gateway could not look at them."""
    if stack.gateway.access != "keys":
        return
    from serving.teams.database import database_url, open_database
    from serving.teams.errors import TeamsError
    from serving.teams.keys import server_secret

    try:
        database = open_database(database_url(runtime.home()))
        try:
            database.prepare()
        finally:
            database.close()
        server_secret(runtime.home())
    except TeamsError as error:
        raise RuntimeFailure(str(error)) from None


def _showing(progress: Progress) -> Callable[[Step], None]:
    """Steps of the components; the first of them means that Serve itself is there."""

    def show(step: Step) -> None:
        progress.show(Step(name=SERVE, step=READY))
        progress.show(step)

    return show


def _check_readable(path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RuntimeFailure(
            f"gateway.tls: {path} cannot be read ({reason}); correct the path or its permissions"
        ) from None


@contextlib.contextmanager
def _ended_unless_done(console: Console) -> Iterator[None]:
    """Leave nothing of a start that failed or was interrupted."""
    try:
        yield
    except BaseException:
        run = runtime.running()
        # Where another command is ending this stack already, it needs no second one.
        if run is not None and not run["stopping"]:
            end(console)
        raise


def _wait_until_reachable(run: Run) -> None:
    deadline = time.monotonic() + REACHABLE_WITHIN_S
    while True:
        ready, text = gateway_ready(run)
        if ready or _serves_without_the_unfit(text):
            return
        if time.monotonic() > deadline:
            raise RuntimeFailure(f"{run['url']}/readyz does not say ready: {text[:500]}")
        time.sleep(LOOK_EVERY_S / 2)


def _serves_without_the_unfit(answer: str) -> bool:
    """Whether all that /readyz misses are variants that failed a probe, and others answer."""
    try:
        words = set(json.loads(answer)["variants"].values())
    except (ValueError, TypeError, KeyError):
        return False
    return words <= {*ANSWERING, UNFIT} and not words <= {UNFIT}


# --- changing what runs -------------------------------------------------------------------


def _update(run: Run, stack: StackSpec, console: Console) -> Up:
    before = history.current()
    if before is None:
        raise RuntimeFailure(
            "what runs was not noted, so it cannot be changed; "
            "`moe-serving down`, then `moe-serving up` again"
        )
    _check_keys(stack)
    with _memory_freed(), Progress(console) as progress, _Driver("change", run) as driver:
        progress.show(Step(name=SERVE, step="loading"))
        driver.send(
            Request(
                address=run["address"],
                temp=run["temp"],
                before=history.to_json(before),
                stack=history.to_json(stack),
            )
        )
        outcome = _succeeded(driver.follow(_switching(progress, stack)))
        progress.show(Step(name=SERVE, step=READY))
    if outcome.changed:
        return Up(run["url"], started_here=False, text=outcome.text)
    return Up(run["url"], started_here=False, text="nothing to change")


@contextlib.contextmanager
def _memory_freed() -> Iterator[None]:
    """Free the shared memory of engines that ended inside the block."""
    memory = runtime.shared_memory()
    try:
        yield
    finally:
        runtime.drop_shared_memory(memory)


def _switching(progress: Progress, stack: StackSpec) -> Callable[[Step], None]:
    """Steps of the components; from the gateway's switch on, `stack` is the current one."""

    def show(step: Step) -> None:
        progress.show(Step(name=SERVE, step=READY))
        progress.show(step)
        if step.name == "gateway" and step.step == READY:
            history.advance(stack)

    return show


# --- the driver process -------------------------------------------------------------------


class _Driver:
    """One action of the driver process; ended at the end of the block, whatever happens."""

    def __init__(self, action: str, run: Run, end_within_s: float = UNDO_WITHIN_S) -> None:
        self._end_within_s = end_within_s
        with runtime.log_file().open("a") as log:
            self._process = subprocess.Popen(
                [*DRIVER, action],
                env=runtime.environment_of(run),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # Ctrl-C in the terminal is for the command alone.
                start_new_session=True,
            )

    def __enter__(self) -> _Driver:
        return self

    def __exit__(self, *_: object) -> None:
        with _uninterrupted():
            if self._process.poll() is None:
                self._process.terminate()
            try:
                self._process.wait(self._end_within_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def send(self, request: Request) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(request.model_dump_json() + "\n")
            self._process.stdin.close()

    def follow(self, show: Callable[[Step], None]) -> Event | None:
        """Show its steps; returns its last event, None where it went without one."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = EVENT.validate_json(line)
            if not isinstance(event, Step):
                return event
            show(event)
        return None


def _succeeded(event: Event | None) -> Outcome:
    if not isinstance(event, Outcome):
        raise RuntimeFailure(_told(event))
    return event


def _told(event: Event | None) -> str:
    run = runtime.running()
    if run is None or run["stopping"]:
        return "the stack was ended by another command"
    if isinstance(event, Failure) and event.refused:
        return event.text
    if isinstance(event, Failure):
        return f"{event.text}\nAll that was printed is in {runtime.log_file()}"
    return f"Ray Serve's driver ended without a word; {runtime.log_file()} has what it printed"


def _end_applications(run: Run) -> None:
    """The ordered part of an end; what it does not manage in time is ended by force."""
    with _Driver("end", run, end_within_s=0.1) as driver:
        driver.send(Request(address=run["address"], within_s=ENGINES_END_WITHIN_S))
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver._process.wait(END_WITHIN_S)


def _uninterrupted() -> AbstractContextManager[None]:
    """Hold SIGINT, SIGTERM and SIGHUP off; the block bounds its own time."""
    return handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIG_IGN)
