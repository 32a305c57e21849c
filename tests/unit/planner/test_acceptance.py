"""From a rate, rates by position, a workload or a study to tokens per step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.planner.acceptance import (
    WORKLOADS,
    Acceptance,
    from_positions,
    from_rate,
    from_study,
    prior,
)
from serving.planner.errors import PlannerError
from serving.studies.records import Drafting

WriteRun = Callable[..., Path]


def test_expected_length_is_one_and_the_sum_of_the_positions() -> None:
    found = from_positions([0.77, 0.55, 0.4, 0.3])
    assert found.expected_length(4) == pytest.approx(3.02)
    assert found.expected_length(0) == 1
    assert found.rate(2) == pytest.approx(0.66)


def test_beyond_what_was_measured_the_last_conditional_rate_goes_on() -> None:
    found = from_positions([0.8, 0.6])
    assert found.at(3) == pytest.approx(0.45)
    assert found.at(4) == pytest.approx(0.3375)


@given(rate=st.floats(0, 1), drafts=st.integers(1, 16))
def test_a_rate_is_met_by_the_positions_it_was_turned_into(rate: float, drafts: int) -> None:
    found = from_rate(rate, drafts)
    assert found.rate(drafts) == pytest.approx(rate, abs=1e-6)
    assert list(found.positions) == sorted(found.positions, reverse=True)


@given(rate=st.floats(0, 1), drafts=st.integers(1, 8), asked=st.integers(1, 20))
def test_expected_length_is_between_one_and_one_more_than_the_drafts(
    rate: float, drafts: int, asked: int
) -> None:
    assert 1 <= from_rate(rate, drafts).expected_length(asked) <= asked + 1


def test_all_accepted_is_all_accepted_at_every_depth() -> None:
    assert from_rate(1, 2).expected_length(6) == 7


@pytest.mark.parametrize("experts", [False, True])
def test_code_is_drafted_best_and_creative_text_worst(experts: bool) -> None:
    lengths = {name: prior(name, experts=experts).expected_length(3) for name in WORKLOADS}
    assert max(lengths, key=lambda name: lengths[name]) == "code"
    assert min(lengths, key=lambda name: lengths[name]) == "creative"


def test_a_prior_names_its_source() -> None:
    assert prior("code", experts=True).source == (
        "code: prior by workload, from the seed measurements (configs/anchors.json)"
    )


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ((), "acceptance: found []; give shares from 0 to 1, one per position"),
        ((1.2,), "acceptance: found [1.2]; give shares from 0 to 1, one per position"),
        (
            (0.5, 0.6),
            "acceptance: found [0.5, 0.6], which rises; give the share of steps that accept at "
            "least 1, 2, ... drafts, as vLLM's per-position rates do",
        ),
    ],
)
def test_positions_that_cannot_be_are_refused(positions: tuple[float, ...], message: str) -> None:
    with pytest.raises(PlannerError) as caught:
        Acceptance(positions, "test")
    assert str(caught.value) == message


def test_an_unknown_workload_is_told_with_the_known_ones() -> None:
    with pytest.raises(PlannerError) as caught:
        prior("poetry", experts=False)
    assert str(caught.value) == ("workload: found 'poetry'; choose mixed, code, chat, creative")


def test_a_study_tells_acceptance_by_position_of_its_deepest_arm(write_run: WriteRun) -> None:
    drafting = Drafting(drafts=10, drafted=20, accepted=13, accepted_per_position=(8, 5))
    shallow = Drafting(drafts=10, drafted=10, accepted=1, accepted_per_position=(1,))
    run = write_run(
        {"draft_tokens": 2, "drafting": drafting},
        {"draft_tokens": 2, "drafting": drafting},
        {"draft_tokens": 1, "drafting": shallow},
    )
    found = from_study(run)
    assert found.positions == (0.8, 0.5)
    assert found.source == "study sweep-1, n = 2"


def test_a_study_without_positions_gives_its_rate(write_run: WriteRun) -> None:
    drafting = Drafting(drafts=10, drafted=20, accepted=13)
    found = from_study(write_run({"draft_tokens": 2, "drafting": drafting}))
    assert found.rate(2) == pytest.approx(0.65)


def test_a_study_that_never_drafted_is_refused(write_run: WriteRun) -> None:
    run = write_run({"draft_tokens": 0})
    with pytest.raises(PlannerError) as caught:
        from_study(run)
    assert str(caught.value) == (
        f"acceptance-from: no answer in {run} tells what was drafted; name a study with an arm "
        "that drafts, or give --acceptance"
    )


def test_a_folder_that_is_no_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match=r"acceptance-from: .*is .* a study's folder\?"):
        from_study(tmp_path)
