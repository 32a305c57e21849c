"""A run: load on a running stack, faults by the schedule, and the count at the end.

Owns the order of things and reading the counters. Leaves starting and ending the stack to the
caller, and words to `report`.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from serving.studies.chaos.faults import Fault, UnrecoveredError, inject, wait_until_whole
from serving.studies.chaos.load import Load, Request
from serving.studies.chaos.processes import StackProcesses, finished_requests, total
from serving.studies.chaos.schedule import schedule

RETRIES = "moe_serving_retries_total"
LEASES = "moe_serving_leases"
IN_THE_ENGINE = ("vllm:num_requests_running", "vllm:num_requests_waiting")
# A slot that is still taken so long after the last request has leaked.
RELEASED_WITHIN_S = 20.0
# What is left of a run after its last fault; recovery may take longer.
QUIET_END_S = 5.0
LAST_FAULT_BEFORE_END_S = 20.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does."""

    seed: int
    seconds: float
    """No fault begins after it; a recovery that is under way is waited for."""
    faults: int | None = None
    """At most so many; the run ends when they are done. None: as many as the time holds."""
    clients: int = 8
    """Requests in flight."""
    engines_begin_at_zero: bool = False
    """Whether an engine's first request is a client's: its probes are off."""


@dataclass(frozen=True, slots=True)
class Suffered:
    """A fault, and how long the stack took to be whole again."""

    fault: Fault
    whole_after_s: float | None
    """From the end of the fault; None where it was not whole in time."""


@dataclass(slots=True)
class Outcome:
    """What came of a run."""

    plan: Plan
    began: float
    """Unix time."""
    requests: list[Request] = field(default_factory=list)
    suffered: list[Suffered] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Faults that there was nothing to do to."""
    retries: float = 0.0
    """By the gateways, those of killed ones as last read."""
    leases: float = 0.0
    """Held by gateways after the last request had ended."""
    in_engines: float = 0.0
    """Requests in engines after the last request had ended."""
    engine_answers: float = 0.0
    """Requests that engines finished, by their own count; of engines whose beginning is known."""
    client_answers: int = 0
    """Requests that clients got whole from the same engines."""
    unclear: int = 0
    """Requests that clients left or that failed, there or nobody knows where."""
    unrecovered: str = ""
    ended: float = 0.0

    @property
    def duplicates(self) -> float:
        """Answers of engines that no client's request accounts for, at least."""
        return max(0.0, self.engine_answers - self.client_answers - self.unclear)


def run_chaos(
    url: str, home: Path, models: Sequence[str], plan: Plan, report: Callable[[str], None]
) -> Outcome:
    """Load the stack at `url` (without /v1) whose state folder is `home`, and do the faults.

    Raises NoStackError where there is none, and UnrecoveredError where it is not whole to begin
    with. What is killed is the stack's own; the caller ends the rest.
    """
    return asyncio.run(_run(url, StackProcesses(home), models, plan, report))


async def _run(
    url: str,
    stack: StackProcesses,
    models: Sequence[str],
    plan: Plan,
    report: Callable[[str], None],
) -> Outcome:
    parts = await asyncio.to_thread(stack.parts)
    await wait_until_whole(stack, parts, url, models)
    counters = _Counters(stack, plan.engines_begin_at_zero)
    await asyncio.to_thread(counters.begin)
    outcome = Outcome(plan, time.time())
    load = Load(url, models, plan.seed, secrets.token_hex(3))
    clients = asyncio.create_task(load.run(plan.clients))
    deadline = time.monotonic() + plan.seconds
    try:
        for planned in itertools.islice(schedule(plan.seed), plan.faults):
            left = deadline - time.monotonic() - LAST_FAULT_BEFORE_END_S
            await asyncio.sleep(max(0.0, min(planned.pause_s, left)))
            if planned.pause_s > left:
                break
            await asyncio.to_thread(counters.read_gateways)
            try:
                fault = await inject(planned, stack, models)
            except ValueError as error:
                outcome.skipped.append(str(error))
                continue
            report(f"{fault.began - outcome.began:4.0f} s: {fault.kind}: {fault.victim}")
            try:
                took_s = await wait_until_whole(stack, parts, url, models, fault.leaving)
            except UnrecoveredError as error:
                outcome.suffered.append(Suffered(fault, None))
                outcome.unrecovered = str(error)
                break
            outcome.suffered.append(Suffered(fault, took_s))
            report(f"{time.time() - outcome.began:4.0f} s: whole again after {took_s:.0f} s")
        rest = QUIET_END_S if plan.faults is not None else deadline - time.monotonic()
        await asyncio.sleep(max(QUIET_END_S, rest))
    except asyncio.CancelledError:
        clients.cancel()
        raise
    load.stop()
    await clients
    outcome.requests = load.requests
    await _settle(counters, outcome)
    outcome.ended = time.time()
    return outcome


async def _settle(counters: _Counters, outcome: Outcome) -> None:
    """Read all counters once every slot is free, or when it should have been."""
    deadline = time.monotonic() + RELEASED_WITHIN_S
    while True:
        outcome.leases, outcome.in_engines = await asyncio.to_thread(counters.held)
        if not (outcome.leases or outcome.in_engines) or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.5)
    await asyncio.to_thread(counters.end, outcome)


class _Counters:
    """What gateways and engines count, over the whole run."""

    def __init__(self, stack: StackProcesses, engines_begin_at_zero: bool) -> None:
        self._stack = stack
        self._from_zero = engines_begin_at_zero
        self._at_first: dict[int, float] = {}
        self._retries_before: dict[int, float] = {}
        self._retries: dict[int, float] = {}

    def begin(self) -> None:
        """Note where each counter stands."""
        for replica in self._stack.engines():
            text = self._stack.engine_metrics(replica)
            self._at_first[replica.process.pid] = finished_requests(text)
        self.read_gateways()
        self._retries_before = dict(self._retries)

    def read_gateways(self) -> None:
        """Note the retries of the gateways that live now."""
        for pid, text in self._stack.gateway_metrics().items():
            self._retries[pid] = total(text, RETRIES)

    def held(self) -> tuple[float, float]:
        """Leases of all gateways, and requests in all engines."""
        gateways = self._stack.gateway_metrics().values()
        engines = [self._stack.engine_metrics(replica) for replica in self._stack.engines()]
        return (
            sum(total(text, LEASES) for text in gateways),
            sum(total(text, name) for text in engines for name in IN_THE_ENGINE),
        )

    def end(self, outcome: Outcome) -> None:
        """Fill in what the counters say."""
        self.read_gateways()
        outcome.retries = sum(
            value - self._retries_before.get(pid, 0.0) for pid, value in self._retries.items()
        )
        known = set()
        for replica in self._stack.engines():
            first = self._at_first.get(replica.process.pid, 0.0 if self._from_zero else None)
            if first is not None and replica.name:
                known.add(replica.name)
                text = self._stack.engine_metrics(replica)
                outcome.engine_answers += finished_requests(text) - first
        for request in outcome.requests:
            if request.outcome == "answered":
                outcome.client_answers += request.replica in known
            elif request.replica in known or not request.replica:
                outcome.unclear += 1
