"""From readings to figures, targets, tables and JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.console import Console

from serving.studies.overhead import report
from serving.studies.overhead.measure import Measured, OneToken, Reading
from serving.studies.overhead.processes import Kind
from serving.studies.overhead.servers import BARE, RAY_DEFAULT, RAY_DIRECT, STACK


def reading(server: str, number: int = 0, **changes: Any) -> Reading:
    values: dict[str, Any] = {
        "server": server,
        "streams": 16,
        "round": number,
        "tokens": 1000,
        "seconds": 2.0,
        "ttft_s": 0.05,
        "tpot_s": 0.02,
        "cpu_s": {Kind.ENGINE_CORE: 1.5, Kind.API_SERVER: 0.1},
    }
    return Reading(**values | changes)


def all_four(
    stack_cpu: float = 0.25, stack_seconds: float = 2.1, stack_one_token_s: float = 0.030
) -> Measured:
    return Measured(
        readings=(
            reading(BARE),
            reading(
                STACK,
                seconds=stack_seconds,
                cpu_s={Kind.ENGINE_REPLICA: stack_cpu, Kind.RAY: 9.0, Kind.ENGINE_CORE: 9.0},
            ),
            reading(RAY_DEFAULT, cpu_s={Kind.ENGINE_REPLICA: 0.4, Kind.INGRESS: 0.6}),
            reading(RAY_DIRECT, cpu_s={Kind.ENGINE_REPLICA: 0.2, Kind.PROXY: 0.06}),
        ),
        one_token=(
            OneToken(BARE, 0, (0.021, 0.022, 0.9)),
            OneToken(STACK, 0, (stack_one_token_s,)),
        ),
    )


def outcome(measured: Measured) -> list[bool]:
    figures = report.condense(measured.readings)
    return [each.reached for each in report.targets(figures, report.one_token_ms(measured))]


def test_speeds_are_medians_over_rounds_and_cpu_time_is_pooled() -> None:
    readings = [
        reading(BARE, 0, seconds=1.0, ttft_s=0.01, cpu_s={Kind.API_SERVER: 0.10}),
        reading(BARE, 1, seconds=2.0, ttft_s=0.03, cpu_s={Kind.API_SERVER: 0.20}),
        reading(BARE, 2, seconds=4.0, ttft_s=0.02, cpu_s={Kind.API_SERVER: 0.33}),
    ]
    [figures] = report.condense(readings)
    assert (figures.tokens_per_s, figures.ttft_ms, figures.tpot_ms) == (500, 20, 20)
    assert figures.cpu_us_per_token == {"API server": pytest.approx(210)}


def test_the_request_path_leaves_out_the_engine_core_and_ray() -> None:
    cpu = {
        Kind.ENGINE_CORE: 3.0,
        Kind.RAY: 2.0,
        Kind.CONTROLLER: 1.0,
        Kind.ENGINE_REPLICA: 0.2,
        Kind.GATEWAY: 0.1,
        Kind.PROXY: 0.03,
    }
    [figures] = report.condense([reading(STACK, cpu_s=cpu)])
    assert figures.request_path_us_per_token == pytest.approx(330)


def test_figures_keep_servers_and_numbers_of_streams_apart() -> None:
    readings = [reading(BARE, streams=1), reading(STACK, streams=1), reading(BARE, streams=8)]
    keys = [(each.server, each.streams) for each in report.condense(readings)]
    assert keys == [(BARE, 1), (STACK, 1), (BARE, 8)]


@pytest.mark.parametrize(
    ("changes", "reached"),
    [
        ({}, [True, True, True, True]),
        ({"stack_cpu": 0.28}, [True, False, True, True]),
        ({"stack_cpu": 0.31}, [False, False, True, True]),
        ({"stack_seconds": 2.3}, [True, True, False, True]),
        ({"stack_one_token_s": 0.033}, [True, True, True, False]),
    ],
)
def test_each_target_fails_by_its_own_figure(changes: dict[str, float], reached: Any) -> None:
    assert outcome(all_four(**changes)) == reached


def test_targets_are_taken_at_sixteen_streams_where_those_were_measured() -> None:
    measured = all_four()
    more = tuple(
        reading(each.server, streams=32, cpu_s=each.cpu_s, seconds=1.0)
        for each in measured.readings
    )
    figures = report.condense(measured.readings + more)
    names = [each.name for each in report.targets(figures, report.one_token_ms(measured))]
    assert names[2] == "tokens/s over the bare server's, 16 streams: at least"


def test_the_json_holds_rounds_figures_targets_and_where_they_were_measured() -> None:
    found = json.loads(json.dumps(report.as_json(all_four(), "tiny-moe")))
    assert found["rounds"][0]["cpu_s"] == {"engine core": 1.5, "API server": 0.1}
    assert found["one_token_ms"] == {BARE: 22.0, STACK: 30.0}
    assert [target["reached"] for target in found["targets"]] == [True] * 4
    assert found["load"]["model"] == "tiny-moe"
    assert {"cpu", "cores", "memory_gib", "system", "python"} == found["machine"].keys()
    assert found["versions"].keys() <= set(report.PACKAGES)


def test_the_table_says_what_was_reached() -> None:
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(report.as_tables(all_four(stack_cpu=0.28)))
    text = capture.get()
    cells = [line.strip("│ ").split("│") for line in text.splitlines() if ": at " in line]
    assert [cell[-1].strip() for cell in cells] == ["yes", "no", "yes", "yes"]
    assert "one-token request, ms: bare vLLM API server 22.0, this stack 30.0" in text
