"""The ramp, its figures and its report, on counts worked by hand and on the studies' own server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from serving.catalog.errors import ConfigError
from serving.studies.client import Client, Request, completion_request
from serving.studies.prompts import load_prompts
from serving.studies.routing.figures import (
    ARMS,
    DRAFTING,
    PLAIN,
    ROUTED,
    NothingMeasuredError,
    figures_of,
    headline,
    reached,
)
from serving.studies.routing.ramp import Shape, StepCount, Tally, run_ramp
from serving.studies.routing.report import Outcome, as_json, as_table, halves, write_report
from serving.studies.routing.run import contest, run_rounds, shape_of

UP_AND_DOWN = Shape((1, 3, 1), step_s=10, settle_s=2)


def step(streams: int, **tokens: float) -> StepCount:
    return StepCount(streams, window_s=1.0, tokens=tokens)


def rounds_of(
    mtp: list[float], plain: list[float], routed: list[float]
) -> dict[str, list[list[StepCount]]]:
    """Three rounds of steps of 1 and 32 streams; from round to round all rise a little."""
    streams = [1, 32][: len(mtp)]

    def ramps(values: list[float], variant: str) -> list[list[StepCount]]:
        return [
            [step(s, **{variant: v * more}) for s, v in zip(streams, values, strict=True)]
            for more in (1.0, 1.01, 1.02)
        ]

    return {DRAFTING: ramps(mtp, "mtp"), PLAIN: ramps(plain, "plain"), ROUTED: ramps(routed, "mtp")}


def test_a_stream_runs_while_a_step_has_that_many() -> None:
    assert list(UP_AND_DOWN.spans(0)) == [(0, 30)]
    assert list(UP_AND_DOWN.spans(2)) == [(10, 20)]
    assert list(UP_AND_DOWN.spans(3)) == []
    assert list(Shape((2, 1, 2), 5, 1).spans(1)) == [(0, 5), (10, 15)]


@pytest.mark.parametrize(
    ("second", "found"),
    [(-0.1, None), (1.9, None), (2.0, 0), (9.9, 0), (10.0, None), (12.0, 1), (30.0, None)],
)
def test_a_second_counts_to_the_step_whose_window_holds_it(
    second: float, found: int | None
) -> None:
    assert UP_AND_DOWN.step_at(second) == found


def test_an_answers_tokens_count_where_they_came() -> None:
    tally = Tally(UP_AND_DOWN)
    tally.add([1.0, 9.0, 11.0, 13.0], tokens=8, variant="mtp")
    tally.add([13.0, 14.0], tokens=3, variant="plain")
    tally.fail(35.0)

    assert [each.tokens for each in tally.steps] == [{"mtp": 2}, {"mtp": 2, "plain": 3}, {}]
    assert tally.steps[1].tokens_per_s == 5 / 8
    assert [each.failures for each in tally.steps] == [0, 0, 1]


def test_the_better_variant_is_told_for_each_step_and_the_router_held_against_it() -> None:
    first, last = figures_of(rounds_of([120, 80], [100, 100], [118, 90]), "mtp")

    assert (first.better, last.better) == (DRAFTING, PLAIN)
    assert first.ratio.value == pytest.approx(118 / 120)
    assert (first.verdict, last.verdict) == ("held", "missed")
    assert last.throughput[PLAIN].value == pytest.approx(101)
    assert last.throughput[PLAIN].low == pytest.approx(100)
    assert first.drafting_share == 1
    assert first.differs == pytest.approx(0.2)


def test_a_step_whose_interval_reaches_below_the_goal_is_held_by_the_median_only() -> None:
    rounds = rounds_of([100], [80], [100])
    rounds[ROUTED][0][0].tokens["mtp"] = 90.0
    [only] = figures_of(rounds, "mtp")

    assert only.ratio.low is not None and only.ratio.low < 0.95 <= only.ratio.value
    assert only.verdict == "held by the median"


def test_a_step_whose_interval_reaches_the_goal_is_missed_by_the_median_only() -> None:
    rounds = rounds_of([100], [80], [94])
    rounds[ROUTED][0][0].tokens["mtp"] = 99.0
    [only] = figures_of(rounds, "mtp")

    assert only.verdict == "missed by the median"
    assert not only.held


def test_the_goal_needs_a_range_where_the_variants_differ() -> None:
    alike = figures_of(rounds_of([100], [95], [100]), "mtp")
    apart = figures_of(rounds_of([120], [100], [120]), "mtp")

    assert not reached(alike) and "says little" in headline(alike)
    assert reached(apart) and "says little" not in headline(apart)
    assert not reached(figures_of(rounds_of([120], [100], [100]), "mtp"))


def test_an_arm_without_a_token_is_no_figure() -> None:
    with pytest.raises(NothingMeasuredError, match=r"static plain .* step 1 \(1 streams\)"):
        figures_of(rounds_of([100], [0], [100]), "mtp")


def test_steps_are_as_long_as_the_minutes_allow() -> None:
    assert shape_of((1, 2, 1), rounds=5, minutes=6).step_s == 8

    with pytest.raises(ValueError, match=r"minutes: found 1, .* give at least 3\.0"):
        shape_of((1, 2, 1), rounds=5, minutes=1)


def test_the_shipped_stack_is_a_contest_and_the_crossover_an_option() -> None:
    shipped, changed = contest("routing-demo"), contest("routing-demo", crossover=9)

    assert shipped.names == {
        DRAFTING: "tiny-moe@mtp",
        PLAIN: "tiny-moe@plain",
        ROUTED: "tiny-moe",
    }
    assert (changed.crossover, changed.stack.models[0].routing.crossover_streams) == (9, {"mtp": 9})
    assert shipped.crossover != 9


def test_a_stack_without_a_router_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"demo.*models\[0\].routing: .*load-aware"):
        contest("demo")


async def test_a_ramp_sends_as_many_at_once_as_its_step_says(fake: Callable[..., str]) -> None:
    url = fake("--first-after", "0.05")
    sent: list[int] = []

    def request(number: int) -> Request:
        sent.append(number)
        return completion_request("x", "p", max_tokens=4)

    async with Client(f"{url}/v1") as client:
        steps = await run_ramp(client, request, Shape((1, 4, 1), step_s=0.6, settle_s=0.1))

    assert sent == list(range(len(sent)))
    assert [each.failures for each in steps] == [0, 0, 0]
    assert all(each.tokens_per_s > 0 for each in steps)
    assert len(sent) >= 1 + 3 + 1


async def test_a_failed_request_is_counted_and_the_stream_goes_on(
    fake: Callable[..., str],
) -> None:
    async with Client(f"{fake('0')}/v1") as client:
        request = completion_request("x", "p", max_tokens=4)
        steps = await run_ramp(client, lambda _: request, Shape((2,), step_s=0.8, settle_s=0.1))

    assert steps[0].failures >= 4
    assert steps[0].tokens == {}


def test_a_whole_comparison_becomes_a_report(
    fake: Callable[..., str], tmp_path: Path, module: Callable[[str], ModuleType]
) -> None:
    given = module("routing").options(["--steps", "1,2,1", "--rounds", "2", "--max-tokens", "8"])
    chosen, shape = contest("routing-demo"), Shape(given.steps, step_s=0.3, settle_s=0.1)
    told: list[str] = []
    rounds = asyncio.run(
        run_rounds(
            chosen,
            f"{fake('--first-after', '0.005')}/v1",
            shape,
            given.rounds,
            load_prompts("demo-code"),
            given.max_tokens,
            told.append,
        )
    )
    outcome = Outcome(
        contest=chosen,
        shape=shape,
        rounds=rounds,
        steps=figures_of(rounds, "mtp"),
        max_tokens=8,
        prompts="demo-code",
        began="2026-01-01",
        machine={"cpu": "two cores"},
        commit=None,
        command="python loadtests/routing.py",
    )
    files = {file.name: file for file in write_report(outcome, tmp_path)}

    assert [line.partition(":")[0] for line in told] == [
        f"round {number} of 2, {arm}"
        for number, arm in (
            (1, DRAFTING),
            (1, PLAIN),
            (1, ROUTED),
            (2, PLAIN),
            (2, ROUTED),
            (2, DRAFTING),
        )
    ]
    assert json.loads(files["routing.json"].read_text())["crossover_streams"] == {"mtp": 20}
    assert "crossover_streams {mtp: 20}" in files["report.md"].read_text()
    assert {"throughput-up.svg", "throughput-down.svg", "ratio.svg"} <= files.keys()
    assert "load-aware" in files["throughput-up.svg"].read_text()
    assert as_table(outcome).row_count == 3
    assert list(as_json(outcome)["rounds"]) == list(ARMS)


def test_the_top_of_a_ramp_is_on_both_ways() -> None:
    up_only = figures_of(rounds_of([120, 80], [100, 100], [118, 90]), "mtp")

    assert {way: [s.streams for s in part] for way, part in halves(up_only).items()} == {
        "up": [1, 32]
    }


@pytest.mark.parametrize("text", ["", "0", "1,,2", "1,x", "257", "-1"])
def test_steps_that_are_no_numbers_of_streams_are_refused(
    text: str, module: Callable[[str], ModuleType]
) -> None:
    with pytest.raises(SystemExit):
        module("routing").options([f"--steps={text}"])
