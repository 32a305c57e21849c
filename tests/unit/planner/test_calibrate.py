"""A machine's bandwidth, an engine's fixed costs, and what they predict of the demo models."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from serving.catalog import find_gpu, find_model
from serving.planner.acceptance import from_rate
from serving.planner.calibrate import (
    Calibration,
    Point,
    calibrate,
    card_of,
    fixed_costs,
    measure_bandwidth,
    points_of_card,
    points_of_study,
    read_calibration,
    write_calibration,
)
from serving.planner.constants import VLLM_CPU
from serving.planner.errors import PlannerError
from serving.planner.machine import machine_of
from serving.planner.precision import precision_of
from serving.planner.speed import Setup, Target, decode, step_time
from serving.studies.records import Drafting

WriteRun = Callable[..., Path]


def cpu_setup(model: str = "tiny-moe", bandwidth: float = 10e9) -> Setup:
    entry = find_model(model)
    target = Target.of(entry, precision_of(entry, "bf16"))
    return Setup(target, machine_of(find_gpu("cpu"), bandwidth=bandwidth), VLLM_CPU)


def test_copying_memory_has_a_bandwidth() -> None:
    assert measure_bandwidth(buffer_bytes=1024**2, passes=2) > 1e8


def test_fixed_costs_come_back_out_of_the_speed_ups_they_cause() -> None:
    family = replace(VLLM_CPU, step_s=5e-3, draft_s=0.7e-3, speculation_s=2e-3)
    setup = replace(cpu_setup(), family=family)
    acceptance = from_rate(0.6, 2)
    points = [
        Point(n, acceptance.expected_length(n), decode(setup, n, acceptance).speedup)
        for n in (1, 2, 3, 5)
    ]
    found = fixed_costs(setup, step_time(setup).total, points)
    assert found == pytest.approx((2e-3, 0.7e-3))
    calibrated = calibrate(find_model("tiny-moe"), setup, points, step_time(setup).total, "a test")
    assert calibrated.family.step_s == pytest.approx(5e-3)
    assert calibrated.overhead_source == "tiny-moe: a test"


@pytest.mark.parametrize(
    "points",
    [
        # Deeper drafts that cost less, and a step that would cost less than nothing.
        [Point(1, 1.8, 1.0), Point(3, 2.2, 2.0)],
        [Point(1, 1.8, 1.79), Point(3, 2.8, 1.2)],
    ],
)
def test_no_fixed_cost_is_below_nothing(points: list[Point]) -> None:
    speculation, draft = fixed_costs(cpu_setup(), 6e-3, points)
    assert min(speculation, draft) >= 0


def test_one_number_of_drafts_is_too_few() -> None:
    with pytest.raises(PlannerError, match="give speed-ups of two numbers of draft tokens"):
        fixed_costs(cpu_setup(), 6e-3, [Point(2, 2.0, 1.5)])


def test_the_shipped_card_is_read() -> None:
    greedy = points_of_card(card_of("tiny-moe"))
    assert [point.draft_tokens for point in greedy] == [1, 2, 3, 4, 5]
    assert all(1 < point.tokens_per_step < point.draft_tokens + 1 for point in greedy)
    assert len(points_of_card(card_of("tiny-moe"), "0.7")) == len(greedy)


def test_costs_of_greedy_decoding_predict_the_speed_ups_of_sampling() -> None:
    setup = cpu_setup()
    found = calibrate(
        find_model("tiny-moe"),
        setup,
        points_of_card(card_of("tiny-moe")),
        VLLM_CPU.step_s,
        "its card",
    )
    calibrated = replace(setup, family=found.family)
    errors = []
    for point in points_of_card(card_of("tiny-moe"), "0.7"):
        acceptance = from_rate((point.tokens_per_step - 1) / point.draft_tokens, point.draft_tokens)
        predicted = decode(calibrated, point.draft_tokens, acceptance).speedup
        errors.append(abs(predicted / point.speedup - 1))
    assert statistics.median(errors) < 0.12


@pytest.mark.parametrize("text", [None, "# no table here\n"])
def test_a_card_without_speed_ups_is_refused(tmp_path: Path, text: str | None) -> None:
    card = tmp_path / "README.md"
    if text is not None:
        card.write_text(text)
    with pytest.raises(PlannerError, match=r"^card: "):
        points_of_card(card)


def test_a_study_gives_the_plain_step_and_the_speed_ups(write_run: WriteRun) -> None:
    drafting = Drafting(drafts=10, drafted=20, accepted=14)
    plain = {"draft_tokens": 0, "ttft_s": 0.1, "duration_s": 1.1, "completion_tokens": 101}
    faster = plain | {"draft_tokens": 2, "duration_s": 0.6, "drafting": drafting}
    busy = plain | {"streams": 8, "duration_s": 9.0}
    points, step = points_of_study(write_run(plain, faster, busy))
    assert step == pytest.approx(0.01)
    assert points == [Point(2, pytest.approx(2.4), pytest.approx(2.0))]


def test_a_study_without_a_plain_arm_is_refused(write_run: WriteRun) -> None:
    run = write_run({"draft_tokens": 2})
    with pytest.raises(PlannerError, match="has no plain arm and arms that draft at one stream"):
        points_of_study(run)


def test_a_calibration_is_remembered(tmp_path: Path) -> None:
    found = Calibration(9e9, 5e-3, 1e-3, 2e-3, "a test")
    assert read_calibration(tmp_path / "home") is None
    file = write_calibration(tmp_path / "home", found)
    assert file == tmp_path / "home" / "cpu-calibration.json"
    assert read_calibration(tmp_path / "home") == found


@pytest.mark.parametrize("text", ["not json", "{}", '{"bandwidth": 1, "more": 2}'])
def test_a_broken_calibration_is_told_with_its_cure(tmp_path: Path, text: str) -> None:
    (tmp_path / "cpu-calibration.json").write_text(text)
    with pytest.raises(PlannerError, match="run `moe-serving plan calibrate` again"):
        read_calibration(tmp_path)
