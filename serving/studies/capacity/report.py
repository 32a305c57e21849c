"""From the rounds' readings to figures, goals, tables and JSON.

Owns the statistics and the goals. Every figure is a median over rounds. What one target is to
another (added latency, ratios) is taken within each round, so that a machine that is slower in
one round is so for both.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from serving.studies.capacity import wire
from serving.studies.capacity.measure import BURST, PACED, WARM_UP_S, WHOLE, Reading
from serving.studies.capacity.study import Measured
from serving.studies.capacity.targets import (
    APP,
    DEPLOYED,
    DIRECT,
    LABELS,
    LEASES,
    RELAY,
)
from serving.studies.overhead.processes import Kind
from serving.studies.overhead.report import Target as Goal
from serving.studies.overhead.report import machine, versions

MAX_CPU_OF_RELAY = 1.2
MIN_RATE_OF_RELAY = 0.8
# Each contains the one before; its cost is what it adds.
LAYERS = (RELAY, APP, LEASES, DEPLOYED)


@dataclass(frozen=True, slots=True)
class Figures:
    """One target under one load, over all rounds. CPU time of what a request passes through."""

    target: str
    workload: str
    requests_per_s: float
    chunks_per_s: float
    cpu_us_per_chunk: float | None
    """None for whole replies."""
    cpu_us_per_request: float
    cpu_by_kind_us: dict[str, float]
    """By kind of process: per chunk, of whole replies per request."""
    other_cpu_us: float
    """Of Ray's own processes: per chunk, of whole replies per request."""
    engine_cpu_us: float
    client_cpu_us: float
    ttfb_p50_ms: float
    ttfb_p99_ms: float
    total_p50_ms: float
    total_p99_ms: float
    added_ttfb_p50_ms: float
    """Over the mock engine's own in the same round; so are the next three."""
    added_ttfb_p99_ms: float
    added_total_p50_ms: float
    added_total_p99_ms: float


def condense(readings: Sequence[Reading]) -> list[Figures]:
    """The figures of each target and load, in the order of the layers; needs the engine's own."""
    groups: dict[tuple[str, str], list[Reading]] = {}
    for reading in readings:
        groups.setdefault((reading.workload, reading.target), []).append(reading)
    direct = {(each.workload, each.round): each for each in readings if each.target == DIRECT}
    return [
        _figures(groups[load, name], direct)
        for load in (WHOLE, PACED, BURST)
        for name in LABELS
        if (load, name) in groups
    ]


def goals(readings: Sequence[Reading]) -> list[Goal]:
    """What the deployed gateway is to reach beside the bare relay."""
    if not any(each.target == DEPLOYED for each in readings):
        return []
    cpu = ratio(readings, PACED, DEPLOYED, cpu_per_chunk)
    rate = ratio(readings, WHOLE, DEPLOYED, request_rate)
    return [
        Goal(
            "CPU per chunk as deployed, over the bare relay's: at most",
            cpu,
            MAX_CPU_OF_RELAY,
            cpu <= MAX_CPU_OF_RELAY,
        ),
        Goal(
            "requests/s as deployed, over the bare relay's: at least",
            rate,
            MIN_RATE_OF_RELAY,
            rate >= MIN_RATE_OF_RELAY,
        ),
    ]


def ratio(
    readings: Sequence[Reading], workload: str, name: str, value: Callable[[Reading], float]
) -> float:
    """`value` of this target over the bare relay's: the median of the rounds' ratios."""
    relay = {
        each.round: value(each)
        for each in readings
        if each.target == RELAY and each.workload == workload
    }
    return statistics.median(
        value(each) / relay[each.round]
        for each in readings
        if each.target == name and each.workload == workload
    )


def cpu_per_chunk(reading: Reading) -> float:
    """Microseconds, of what a request passes through."""
    return 1e6 * sum(reading.path_cpu_s.values()) / reading.chunks


def request_rate(reading: Reading) -> float:
    """Requests per second."""
    return reading.requests / reading.seconds


def as_json(measured: Measured) -> dict[str, Any]:
    """Everything: machine, versions, loads, each round's readings, medians and goals."""
    return {
        "schema": 1,
        "study": "gateway",
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "plan": asdict(measured.plan)
        | {"warm_up_s": WARM_UP_S, "event_bytes": wire.EVENT_BYTES}
        | {"prompt_bytes": wire.PROMPT_BYTES},
        "targets": LABELS,
        "skipped": measured.skipped,
        "rounds": [
            asdict(each) | {"ttfb": each.ttfb.model_dump(), "total": each.total.model_dump()}
            for each in measured.readings
        ],
        "figures": [asdict(each) for each in condense(measured.readings)],
        "goals": [asdict(each) for each in goals(measured.readings)],
    }


def as_tables(measured: Measured) -> RenderableType:
    """Figures, layers and goals for a terminal."""
    figures = condense(measured.readings)
    size = measured.plan
    measured_names = {each.target for each in figures}
    parts: list[RenderableType] = [
        *(f"{name}: {label}" for name, label in LABELS.items() if name in measured_names),
        _capacity([each for each in figures if each.workload == WHOLE], size.connections),
        _streams(
            [each for each in figures if each.workload == PACED],
            f"Streams of {size.chunks} chunks {size.delay_ms} ms apart; CPU per chunk",
        ),
        _streams(
            [each for each in figures if each.workload == BURST],
            f"Streams of {size.chunks} chunks, as fast as they go; CPU per chunk",
        ),
        _layers(figures),
    ]
    if reached := goals(measured.readings):
        parts.append(_goals(reached))
    parts += [f"{LABELS[name]} was left out: {why}" for name, why in measured.skipped.items()]
    return Group(*parts)


def _figures(readings: Sequence[Reading], direct: dict[tuple[str, int], Reading]) -> Figures:
    first = readings[0]
    whole = first.workload == WHOLE

    def median(values: Iterable[float]) -> float:
        return statistics.median(values)

    def units(reading: Reading) -> int:
        return reading.requests if whole else reading.chunks

    def per_unit(value: Callable[[Reading], float]) -> float:
        return median(1e6 * value(each) / units(each) for each in readings)

    def added(value: Callable[[Reading], float]) -> float:
        return median(value(each) - value(direct[each.workload, each.round]) for each in readings)

    kinds = [kind for kind in Kind if any(kind in each.path_cpu_s for each in readings)]
    return Figures(
        target=first.target,
        workload=first.workload,
        requests_per_s=median(map(request_rate, readings)),
        chunks_per_s=median(each.chunks / each.seconds for each in readings),
        cpu_us_per_chunk=None if whole else median(map(cpu_per_chunk, readings)),
        cpu_us_per_request=median(
            1e6 * sum(each.path_cpu_s.values()) / each.requests for each in readings
        ),
        cpu_by_kind_us={
            str(kind): median(
                1e6 * each.path_cpu_s.get(kind, 0.0) / units(each) for each in readings
            )
            for kind in kinds
        },
        other_cpu_us=per_unit(lambda each: each.other_cpu_s),
        engine_cpu_us=per_unit(lambda each: each.engine_cpu_s),
        client_cpu_us=per_unit(lambda each: each.client_cpu_s),
        ttfb_p50_ms=median(each.ttfb.p50_ms for each in readings),
        ttfb_p99_ms=median(each.ttfb.p99_ms for each in readings),
        total_p50_ms=median(each.total.p50_ms for each in readings),
        total_p99_ms=median(each.total.p99_ms for each in readings),
        added_ttfb_p50_ms=added(lambda each: each.ttfb.p50_ms),
        added_ttfb_p99_ms=added(lambda each: each.ttfb.p99_ms),
        added_total_p50_ms=added(lambda each: each.total.p50_ms),
        added_total_p99_ms=added(lambda each: each.total.p99_ms),
    )


def _table(title: str, first: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    # Targets have short names; goals are sentences.
    table.add_column(first, no_wrap=first != "goal")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _capacity(figures: Sequence[Figures], connections: int) -> Table:
    table = _table(
        f"Whole replies, {connections} connections; CPU per request",
        "target",
        "requests/s",
        "CPU µs",
        "engine's",
        "added ms p50",
        "p99",
    )
    for each in figures:
        table.add_row(
            each.target,
            f"{each.requests_per_s:.0f}",
            _cpu(each.target, each.cpu_us_per_request),
            f"{each.engine_cpu_us:.0f}",
            *_added(each, each.added_total_p50_ms, each.added_total_p99_ms),
        )
    return table


def _streams(figures: Sequence[Figures], title: str) -> Table:
    table = _table(
        title,
        "target",
        "chunks/s",
        "CPU µs",
        "engine's",
        "added ms to first byte p50",
        "p99",
        "to the end p50",
        "p99",
    )
    for each in figures:
        assert each.cpu_us_per_chunk is not None
        table.add_row(
            each.target,
            f"{each.chunks_per_s:.0f}",
            _cpu(each.target, each.cpu_us_per_chunk),
            f"{each.engine_cpu_us:.1f}",
            *_added(
                each,
                each.added_ttfb_p50_ms,
                each.added_ttfb_p99_ms,
                each.added_total_p50_ms,
                each.added_total_p99_ms,
            ),
        )
    return table


def _layers(figures: Sequence[Figures]) -> Table:
    """What each layer costs, and in which process."""
    whole = {each.target: each for each in figures if each.workload == WHOLE}
    paced = {each.target: each for each in figures if each.workload == PACED}
    kinds = (Kind.GATEWAY, Kind.PROXY, Kind.ENGINE_REPLICA)
    table = _table(
        "Layer by layer: CPU per chunk, paced, by process, and per request, whole replies",
        "layer",
        "µs/chunk",
        "more",
        "gateway",
        "proxy",
        "replica",
        "Ray",
        "µs/request",
        "more",
    )
    before: str | None = None
    for name in LAYERS:
        if name not in paced:
            continue
        chunk, request = paced[name].cpu_us_per_chunk, whole[name].cpu_us_per_request
        assert chunk is not None
        more = ["", ""]
        if before in paced:
            over = paced[before].cpu_us_per_chunk
            assert over is not None
            more = [f"{chunk - over:+.1f}", f"{request - whole[before].cpu_us_per_request:+.0f}"]
        by_kind = paced[name].cpu_by_kind_us
        table.add_row(
            name,
            f"{chunk:.1f}",
            more[0],
            *(f"{by_kind[kind]:.1f}" if kind in by_kind else "" for kind in kinds),
            f"{paced[name].other_cpu_us:.1f}" if paced[name].other_cpu_us else "",
            f"{request:.0f}",
            more[1],
        )
        before = name
    return table


def _goals(reached: Sequence[Goal]) -> Table:
    table = _table("Goals", "goal", "limit", "measured", "reached")
    for each in reached:
        table.add_row(
            each.name, f"{each.limit:.2f}", f"{each.value:.2f}", "yes" if each.reached else "no"
        )
    return table


def _cpu(target: str, value: float) -> str:
    return "" if target == DIRECT else f"{value:.1f}"


def _added(figures: Figures, *values: float) -> list[str]:
    return ["" if figures.target == DIRECT else f"{value:.1f}" for value in values]
