"""The interleaved rounds: the same loads on every target, one after the other.

Owns the loads, their order and what is read of each target. Leaves sending requests to `client`,
starting targets to `targets`, and condensing the readings to `report`.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from serving.studies.capacity.client import Latency, Load, LoadSettings
from serving.studies.capacity.targets import LABELS, PEERS, Program, Target
from serving.studies.overhead import processes
from serving.studies.overhead.processes import Kind
from serving.studies.overhead.servers import ServerError

WHOLE, PACED, BURST = "whole", "paced", "burst"
WARM_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a run."""

    rounds: int = 3
    seconds: float = 2.5
    """Of each measured window."""
    connections: int = 64
    chunks: int = 64
    """Of each stream."""
    delay_ms: int = 10
    """Between the chunks of a paced stream."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of load: whole replies, or streams with a pause between chunks."""

    name: str
    stream: bool
    pause_ms: int


@dataclass(frozen=True, slots=True)
class Reading:
    """One target under one load in one round."""

    target: str
    workload: str
    round: int
    seconds: float
    requests: int
    """That ended in the window."""
    chunks: int
    """Events of streams that came in the window; none of whole replies."""
    ttfb: Latency
    total: Latency
    path_cpu_s: dict[Kind, float] = field(default_factory=dict)
    """CPU seconds of the processes that a request passes through."""
    other_cpu_s: float = 0.0
    """CPU seconds of the target's other processes: Ray's own, Serve's controller."""
    engine_cpu_s: float = 0.0
    client_cpu_s: float = 0.0


def workloads(plan: Plan) -> tuple[Workload, ...]:
    """Whole replies; streams at an engine's pace; streams as fast as they go."""
    return (
        Workload(WHOLE, stream=False, pause_ms=0),
        Workload(PACED, stream=True, pause_ms=plan.delay_ms),
        Workload(BURST, stream=True, pause_ms=0),
    )


def order(
    names: Sequence[str], plan: Plan, loads: Sequence[str]
) -> Iterator[tuple[int, str, list[str]]]:
    """Round, load and the targets in the order they are measured in, drawn by the seed."""
    draw = random.Random(plan.seed)
    for number in range(plan.rounds):
        for load in loads:
            shuffled = list(names)
            draw.shuffle(shuffled)
            yield number, load, shuffled


def run_rounds(
    targets: Sequence[Target], engine: Program, plan: Plan, report: Callable[[str], None]
) -> tuple[list[Reading], dict[str, str]]:
    """Measure every target under every load, in every round.

    Returns the readings, and which peers failed and why; they are left out from then on.
    `report` gets a line per reading. Raises ServerError for the first request of another target
    that fails.
    """
    by_name = {target.name: target for target in targets}
    by_load = {load.name: load for load in workloads(plan)}
    readings: list[Reading] = []
    failed: dict[str, str] = {}
    for number, load, names in order(list(by_name), plan, list(by_load)):
        for name in names:
            if name in failed:
                continue
            try:
                reading = _reading(by_name[name], engine, by_load[load], plan, number)
            except ServerError as error:
                if name not in PEERS:
                    raise
                failed[name] = f"round {number + 1}, {load}: {error}"
                report(f"{LABELS[name]} is left out from now on: {error}")
                continue
            readings.append(reading)
            rate = reading.requests / reading.seconds
            where = f"round {number + 1} of {plan.rounds}, {load}: {LABELS[name]}"
            report(f"{where}: {rate:.0f} requests/s")
    return readings, failed


def _reading(
    target: Target, engine: Program, workload: Workload, plan: Plan, number: int
) -> Reading:
    settings = LoadSettings(
        url=target.url,
        connections=plan.connections,
        chunks=plan.chunks,
        pause_ms=workload.pause_ms,
        stream=workload.stream,
        warm_up_s=WARM_UP_S,
        seconds=plan.seconds,
        seed=plan.seed + number,
    )
    # Found beforehand: reading every environment takes long.
    own, mock = target.program.processes(), engine.processes()
    command = [sys.executable, "-m", "serving.studies.capacity.client", settings.model_dump_json()]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _expect(client, "begin", target)
        before = processes.cpu_seconds(own), processes.cpu_seconds(mock)
        _expect(client, "end", target)
        after = processes.cpu_seconds(own), processes.cpu_seconds(mock)
        load = Load.model_validate_json(_line(client, target))
    finally:
        client.kill()
        client.communicate()
    spent = processes.spent(before[0], after[0])
    return Reading(
        target=target.name,
        workload=workload.name,
        round=number,
        seconds=load.seconds,
        requests=load.requests,
        chunks=load.chunks,
        ttfb=load.ttfb,
        total=load.total,
        path_cpu_s={kind: cpu for kind, cpu in spent.items() if kind in target.counted},
        other_cpu_s=sum(cpu for kind, cpu in spent.items() if kind not in target.counted)
        if target.counted
        else 0.0,
        engine_cpu_s=sum(processes.spent(before[1], after[1]).values()),
        client_cpu_s=load.client_cpu_s,
    )


def _expect(client: subprocess.Popen[str], word: str, target: Target) -> None:
    """Return when the client says `word`; raises ServerError where it ends before."""
    said = _line(client, target)
    assert said == word, said


def _line(client: subprocess.Popen[str], target: Target) -> str:
    """The client's next line; raises ServerError where it ends without one."""
    assert client.stdout is not None and client.stderr is not None
    if line := client.stdout.readline():
        return line.strip()
    lines = client.stderr.read().strip().splitlines()
    said = lines[-1] if lines else "no word of why"
    raise ServerError(target.program.failure(f"failed under load ({said})"))
