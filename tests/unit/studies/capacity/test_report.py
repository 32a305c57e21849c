"""From readings to figures, layers, goals, tables and JSON."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from serving.studies.capacity import report
from serving.studies.capacity.client import Latency
from serving.studies.capacity.measure import BURST, PACED, WHOLE, Plan, Reading
from serving.studies.capacity.study import Measured
from serving.studies.capacity.targets import (
    APP,
    DEPLOYED,
    DIRECT,
    LEASES,
    RELAY,
    ROUTER,
)
from serving.studies.overhead.processes import Kind

NO_TIME = Latency(p50_ms=0.0, p99_ms=0.0)


def reading(target: str, workload: str = PACED, number: int = 0, **changes: Any) -> Reading:
    values: dict[str, Any] = {
        "target": target,
        "workload": workload,
        "round": number,
        "seconds": 2.0,
        "requests": 100,
        "chunks": 0 if workload == WHOLE else 10_000,
        "ttfb": NO_TIME,
        "total": NO_TIME,
        "path_cpu_s": {} if target == DIRECT else {Kind.OTHER: 0.3},
        "engine_cpu_s": 0.1,
        "client_cpu_s": 0.2,
    }
    return Reading(**values | changes)


def everything() -> list[Reading]:
    """One round of all layers and one peer; each layer takes 0.1 s more than the one before."""
    names = (DIRECT, RELAY, APP, LEASES, DEPLOYED, ROUTER)
    cpu: dict[str, dict[Kind, float]] = {
        RELAY: {Kind.OTHER: 0.3},
        APP: {Kind.OTHER: 0.4},
        LEASES: {Kind.GATEWAY: 0.4, Kind.ENGINE_REPLICA: 0.1},
        DEPLOYED: {Kind.GATEWAY: 0.5, Kind.ENGINE_REPLICA: 0.1, Kind.PROXY: 0.1},
    }
    return [
        reading(name, load, path_cpu_s=cpu.get(name, {}))
        for load in (WHOLE, PACED, BURST)
        for name in names
    ]


def text_of(readings: list[Reading], skipped: dict[str, str] | None = None) -> str:
    console = Console(width=180, file=io.StringIO())
    with console.capture() as text:
        console.print(report.as_tables(Measured(Plan(), tuple(readings), skipped or {})))
    return text.get()


def test_cpu_is_over_the_chunks_that_were_relayed() -> None:
    figures = report.condense([reading(DIRECT), reading(RELAY)])[1]
    assert figures.cpu_us_per_chunk == pytest.approx(30.0)
    assert figures.cpu_us_per_request == pytest.approx(3000.0)
    assert (figures.engine_cpu_us, figures.client_cpu_us) == pytest.approx((10.0, 20.0))
    assert (figures.requests_per_s, figures.chunks_per_s) == (50.0, 5000.0)


def test_whole_replies_are_counted_by_request() -> None:
    figures = report.condense([reading(DIRECT, WHOLE), reading(RELAY, WHOLE)])[1]
    assert figures.cpu_us_per_chunk is None
    assert figures.cpu_by_kind_us == pytest.approx({"other": 3000.0})
    assert figures.engine_cpu_us == pytest.approx(1000.0)


def test_every_figure_is_the_median_of_its_rounds() -> None:
    rounds = [reading(DIRECT, number=number) for number in range(3)]
    rounds += [
        reading(RELAY, number=number, path_cpu_s={Kind.OTHER: cpu})
        for number, cpu in enumerate((0.3, 9.0, 0.4))
    ]
    assert report.condense(rounds)[1].cpu_us_per_chunk == pytest.approx(40.0)


def test_added_latency_is_over_the_engines_own_in_the_same_round() -> None:
    rounds = []
    # A machine that gets slower by 100 ms a round, and a relay that adds 5.
    for number in range(3):
        own = 100.0 * number
        rounds += [
            reading(DIRECT, number=number, ttfb=Latency(p50_ms=own, p99_ms=own + 1)),
            reading(RELAY, number=number, ttfb=Latency(p50_ms=own + 5, p99_ms=own + 8)),
        ]
    figures = report.condense(rounds)[1]
    assert (figures.added_ttfb_p50_ms, figures.added_ttfb_p99_ms) == (5.0, 7.0)
    assert figures.ttfb_p50_ms == 105.0


def test_ratios_are_taken_within_a_round() -> None:
    rounds = []
    for number, slow in enumerate((1.0, 10.0, 3.0)):
        rounds += [
            reading(RELAY, number=number, path_cpu_s={Kind.OTHER: 0.1 * slow}),
            reading(DEPLOYED, number=number, path_cpu_s={Kind.GATEWAY: 0.15 * slow}),
        ]
    assert report.ratio(rounds, PACED, DEPLOYED, report.cpu_per_chunk) == pytest.approx(1.5)


@pytest.mark.parametrize(("cpu_s", "requests", "reached"), [(0.36, 80, True), (0.37, 79, False)])
def test_goals_are_reached_at_their_limits(cpu_s: float, requests: int, reached: bool) -> None:
    found = report.goals(
        [
            reading(RELAY),
            reading(RELAY, WHOLE),
            reading(DEPLOYED, path_cpu_s={Kind.GATEWAY: cpu_s - 0.1, Kind.PROXY: 0.1 - 1e-9}),
            reading(DEPLOYED, WHOLE, requests=requests),
        ]
    )
    assert [goal.reached for goal in found] == [reached, reached]
    assert [goal.limit for goal in found] == [1.2, 0.8]


def test_without_the_deployed_gateway_there_is_no_goal() -> None:
    assert report.goals([reading(RELAY), reading(APP)]) == []


def test_each_layer_says_what_it_adds_to_the_one_before() -> None:
    lines = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]]
        for line in text_of(everything()).partition("Layer by layer")[2].splitlines()
        if line.startswith("│")
    }
    assert lines["relay"][:2] == ["30.0", ""]
    assert lines["app"][:2] == ["40.0", "+10.0"]
    assert lines["deployed"][:5] == [
        "70.0",
        "+20.0",
        "50.0",
        "10.0",
        "10.0",
    ]


def test_a_target_that_was_left_out_is_named_with_the_reason() -> None:
    assert "vllm-router 0.1.17 was left out: no network" in text_of(
        [reading(DIRECT, load) for load in (WHOLE, PACED, BURST)], {ROUTER: "no network"}
    )


def test_the_json_has_every_reading_figure_and_goal() -> None:
    measured = Measured(Plan(), tuple(everything()), {"litellm": "not there"})
    value = json.loads(json.dumps(report.as_json(measured)))
    assert len(value["rounds"]) == len(value["figures"]) == 18
    assert value["rounds"][0]["ttfb"] == {"p50_ms": 0.0, "p99_ms": 0.0}
    assert (len(value["goals"]), value["skipped"]) == (2, {"litellm": "not there"})
    assert value["plan"]["connections"] == 64
