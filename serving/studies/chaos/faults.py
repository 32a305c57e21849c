"""Doing a fault to a running stack, and waiting until it has recovered.

Owns signals, and what counts as recovered. Leaves which fault comes when to `schedule`, and
what it did to requests to `verdict`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import httpx
import psutil

from serving.studies.chaos.processes import Parts, Replica, StackProcesses, ended
from serving.studies.chaos.schedule import FaultKind, Planned

# Serve gives a hung engine up after about 24 s (docs/engines.md); then it is let go.
HUNG_WITHIN_S = 90.0
# Less than the 6 s in which an engine core has to answer its health check.
SLOW_FOR_S = 3.0
# An engine loads anew, beside others under load.
RECOVERED_WITHIN_S = 240.0
LOOK_EVERY_S = 1.0
# An old process may still be counted while it goes: well twice in a row is well.
LOOKS_IN_A_ROW = 2
ANSWERS_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that was injected. Times are Unix seconds."""

    kind: FaultKind
    victim: str
    """The replica's name, or the kind of process, with its id."""
    replica: str
    """As `x-moe-serving-replica` names it; empty where no engine was hit."""
    began: float
    """Just before the first signal."""
    done: float
    """Just after it."""
    leaving: tuple[psutil.Process, ...] = ()
    """Processes that are to end before the stack is whole again."""


class UnrecoveredError(RuntimeError):
    """The stack was not whole again in time; the text says what is missing."""


async def inject(planned: Planned, stack: StackProcesses, models: Sequence[str]) -> Fault:
    """Do the fault; of a core that is halted, return once it runs again or is gone.

    Engines are those of `models`. A core that is halted runs again also where this is
    cancelled. Raises ValueError where there is nothing to do it to.
    """
    kind = planned.kind
    if kind in (FaultKind.GATEWAY_KILLED, FaultKind.PROXY_KILLED, FaultKind.CONTROLLER_KILLED):
        return await asyncio.to_thread(_kill_others, planned, stack)
    loaded = tuple(f"engine-{model}-" for model in models)
    replicas = [
        each
        for each in await asyncio.to_thread(stack.engines)
        if each.application.startswith(loaded)
    ]
    replica = replicas[planned.choose(len(replicas))]
    if kind is FaultKind.REPLICA_KILLED:
        return _killed(kind, replica, replica.process)
    core = replica.core
    if core is None:
        raise ValueError(f"{replica.application} has no engine core")
    if kind is FaultKind.CORE_KILLED:
        return _killed(kind, replica, core)
    fault = _signalled(kind, replica, core.suspend)
    try:
        limit = SLOW_FOR_S if kind is FaultKind.CORE_SLOW else HUNG_WITHIN_S
        await _until(lambda: ended(core), limit)
    finally:
        with contextlib.suppress(psutil.Error):
            core.resume()
    return replace(fault, leaving=(replica.process,)) if ended(core) else fault


def _killed(kind: FaultKind, replica: Replica, process: psutil.Process) -> Fault:
    return replace(_signalled(kind, replica, process.kill), leaving=(replica.process,))


def _signalled(kind: FaultKind, replica: Replica, act: Callable[[], None]) -> Fault:
    began = time.time()
    with contextlib.suppress(psutil.NoSuchProcess):
        act()
    victim = f"{replica.application} {replica.name}".strip()
    return Fault(kind, victim, replica.name, began, time.time())


def _kill_others(planned: Planned, stack: StackProcesses) -> Fault:
    if planned.kind is FaultKind.GATEWAY_KILLED:
        gateways = stack.gateways()
        victims = [gateways[planned.choose(len(gateways))]]
    elif planned.kind is FaultKind.PROXY_KILLED:
        victims = stack.proxies()
    else:
        victims = stack.controllers()
    planned.choose(len(victims))
    began = time.time()
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    named = ", ".join(str(process.pid) for process in victims)
    return Fault(planned.kind, f"process {named}", "", began, time.time(), tuple(victims))


async def wait_until_whole(
    stack: StackProcesses,
    parts: Parts,
    url: str,
    models: Sequence[str],
    leaving: Sequence[psutil.Process] = (),
) -> float:
    """Return when every part is there again and every model answers: the seconds it took.

    `url` is the gateway's, without /v1. Raises UnrecoveredError.
    """
    began, well, missing = time.monotonic(), 0, ""
    while well < LOOKS_IN_A_ROW:
        left = [process.pid for process in leaving if not ended(process)]
        missing = f"process {left[0]} is still there" if left else ""
        missing = missing or await asyncio.to_thread(missing_of, stack, parts, url, models)
        well = 0 if missing else well + 1
        if missing and time.monotonic() - began > RECOVERED_WITHIN_S:
            raise UnrecoveredError(f"not whole within {RECOVERED_WITHIN_S:.0f} s: {missing}")
        await asyncio.sleep(LOOK_EVERY_S)
    return time.monotonic() - began


def missing_of(stack: StackProcesses, parts: Parts, url: str, models: Sequence[str]) -> str:
    """The first thing that is not there; empty where the stack is whole."""
    engines = [replica.application for replica in stack.engines()]
    for application, count in parts.engines.items():
        if (have := engines.count(application)) < count:
            return f"{have} of {count} replicas of {application}"
    if (have := len(stack.gateways())) < parts.gateways:
        return f"{have} of {parts.gateways} gateways"
    if not stack.controllers():
        return "Serve's controller"
    for model in models:
        # An engine answers it without generating, so it is in no count of requests.
        body = {"model": model, "prompt": "def add(a, b):"}
        try:
            reply = httpx.post(
                f"{url}/tokenize", json=body, timeout=ANSWERS_WITHIN_S, trust_env=False
            )
        except httpx.HTTPError as error:
            return f"an answer of {model} ({type(error).__name__})"
        if reply.status_code != httpx.codes.OK:
            return f"an answer of {model} (HTTP {reply.status_code})"
    return ""


async def _until(condition: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
