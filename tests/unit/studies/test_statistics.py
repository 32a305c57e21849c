"""Every statistic against values worked by hand, or by scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from serving.studies.statistics import (
    Estimate,
    acceptance_rate,
    conditional_rates,
    expected_tokens_per_step,
    mean_acceptance_length,
    median_and_p95,
    per_position_rates,
    proportion,
    ratio_of_medians,
)


def test_the_speed_up_is_the_ratio_of_the_medians() -> None:
    # Medians 20 and 8; the mean ratio would be (1 + 2.5 + 4.5) / 3 = 2.67.
    found = ratio_of_medians([10, 20, 36], [10, 8, 8], ["a", "b", "c"])
    assert found.value == 20 / 8


def test_pairs_that_all_have_one_ratio_leave_no_doubt_when_drawn_together() -> None:
    # Drawn apart, medians of 1 to 9 would give ratios from 2/9 to 18.
    plain = [1.0, 2.0, 4.0, 9.0]
    found = ratio_of_medians([2 * each for each in plain], plain, ["a", "b", "c", "d"])
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0)


def test_the_interval_is_scipys_paired_percentile_bootstrap() -> None:
    random = np.random.default_rng(1)
    plain = random.normal(100, 8, 40)
    faster = plain * random.normal(1.6, 0.15, 40)
    ours = ratio_of_medians(list(faster), list(plain), list(range(40)))
    scipys = stats.bootstrap(
        (faster, plain),
        lambda over, under, axis: np.median(over, axis=axis) / np.median(under, axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=20_000,
        method="percentile",
        rng=2,
    ).confidence_interval
    assert ours.low == pytest.approx(scipys.low, abs=0.015)
    assert ours.high == pytest.approx(scipys.high, abs=0.015)


def test_the_interval_is_the_same_every_time() -> None:
    arguments = [3.0, 5.0, 4.0], [2.0, 2.5, 3.0], ["a", "b", "c"]
    assert ratio_of_medians(*arguments) == ratio_of_medians(*arguments)


def test_rounds_of_one_prompt_do_not_pass_for_more_prompts() -> None:
    rates, plain, prompts = [3.0, 5.0, 4.0], [2.0, 2.5, 3.0], ["a", "b", "c"]
    once = ratio_of_medians(rates, plain, prompts)
    nine_times = ratio_of_medians(rates * 9, plain * 9, prompts * 9)
    assert nine_times == once


def test_prompts_with_unlike_numbers_of_rounds_are_drawn_whole() -> None:
    # Group a holds ratio 2 three times, group b ratio 1 once. Resamples of two groups are
    # aa, ab, ba (median 2 / 1) and bb (1 / 1), one in four: the interval spans both.
    found = ratio_of_medians([2, 2, 2, 1], [1, 1, 1, 1], ["a", "a", "a", "b"])
    assert (found.value, found.low, found.high) == (2.0, 1.0, 2.0)


def test_one_prompt_gives_a_value_but_no_interval() -> None:
    assert ratio_of_medians([3, 3], [2, 2], ["a", "a"]) == Estimate(1.5, None, None)


@pytest.mark.parametrize(
    ("over", "under", "groups", "complaint"),
    [
        ([], [], [], "0 and 0 values in 0 groups do not pair"),
        ([1], [1, 2], ["a"], "1 and 2 values in 1 groups do not pair"),
        ([1, 0], [1, 2], ["a", "b"], "a ratio of medians needs values above 0"),
    ],
)
def test_values_that_make_no_ratio_are_refused(
    over: list[float], under: list[float], groups: list[str], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        ratio_of_medians(over, under, groups)


@pytest.mark.parametrize(
    ("estimate", "verdict"),
    [
        (Estimate(1.8, 1.7, 1.9), "faster"),
        (Estimate(1.1, 1.0, 1.2), "no difference"),
        (Estimate(0.9, 0.8, 0.99), "slower"),
        (Estimate(1.8), "no difference"),
    ],
)
def test_a_speed_up_counts_only_with_its_whole_interval(estimate: Estimate, verdict: str) -> None:
    assert estimate.verdict == verdict


def test_intervals_overlap_where_they_share_a_value() -> None:
    middle = Estimate(1.5, 1.4, 1.6)
    assert middle.overlaps(Estimate(1.7, 1.6, 1.8))
    assert Estimate(1.7, 1.6, 1.8).overlaps(middle)
    assert not middle.overlaps(Estimate(1.7, 1.61, 1.8))
    assert middle.overlaps(Estimate(9.0))


def test_the_95th_percentile_is_linear_between_ranks() -> None:
    # Of 1 … 11 rank 0.95 * 10 = 9.5 lies halfway between 10 and 11.
    assert median_and_p95([float(each) for each in range(11, 0, -1)]) == (6.0, 10.5)
    with pytest.raises(ValueError, match="no values"):
        median_and_p95([])


def test_the_wilson_interval_of_8_in_10_is_as_worked_by_hand() -> None:
    # z = 1.959964, z² = 3.841459: centre (8 + 1.920729) / 13.841459 = 0.716740; half width
    # 1.959964 / 13.841459 * sqrt(8 * 2 / 10 + 0.960365) = 0.141602 * 1.600114 = 0.226579.
    found = proportion(8, 10)
    assert found.value == 0.8
    assert found.low == pytest.approx(0.490161, abs=2e-6)
    assert found.high == pytest.approx(0.943319, abs=2e-6)


def test_a_proportion_of_none_or_of_all_keeps_a_width() -> None:
    # At the ends the width is z² / (n + z²) = 3.841459 / 13.841459.
    assert proportion(0, 10).high == pytest.approx(0.277533, abs=1e-6)
    assert proportion(10, 10).low == pytest.approx(1 - 0.277533, abs=1e-6)
    with pytest.raises(ValueError, match="k"):
        proportion(11, 10)


# Five drafts of 3 tokens, of which 3, 1, 0, 2 and 3 were accepted: 9 of 15. At place 1
# four drafts got through (3, 1, 2, 3), at place 2 three (3, 2, 3), at place 3 two.
DRAFTS, DRAFTED, ACCEPTED, BY_PLACE = 5, 15, 9, (4, 3, 2)


def test_acceptance_rate_and_length_are_vllms() -> None:
    assert acceptance_rate(ACCEPTED, DRAFTED).value == 9 / 15
    assert mean_acceptance_length(ACCEPTED, DRAFTS) == 1 + 9 / 5
    with pytest.raises(ValueError, match="no drafts"):
        mean_acceptance_length(0, 0)


def test_per_position_rates_are_out_of_all_drafts() -> None:
    rates = per_position_rates(BY_PLACE, DRAFTS)
    assert [each.value for each in rates] == [4 / 5, 3 / 5, 2 / 5]
    assert sum(each.value for each in rates) == pytest.approx(
        mean_acceptance_length(ACCEPTED, DRAFTS) - 1
    )


def test_conditional_rates_are_out_of_the_drafts_that_got_there() -> None:
    assert conditional_rates(BY_PLACE, DRAFTS) == (
        proportion(4, 5),
        proportion(3, 4),
        proportion(2, 3),
    )
    assert conditional_rates((2, 0, 0), 4) == (proportion(2, 4), proportion(0, 2), None)


def test_expected_tokens_per_step_is_the_geometric_sum() -> None:
    # 1 + 0.8 + 0.64 + 0.512, and (1 - 0.8^4) / (1 - 0.8) = 0.5904 / 0.2.
    assert expected_tokens_per_step(3, 0.8) == pytest.approx(2.952)
    assert expected_tokens_per_step(3, 0.8) == pytest.approx((1 - 0.8**4) / (1 - 0.8))
    assert expected_tokens_per_step(0, 0.8) == 1
    assert expected_tokens_per_step(3, 1) == 4
    assert expected_tokens_per_step(3, 0) == 1


@pytest.mark.parametrize(("n", "rate"), [(-1, 0.5), (2, 1.01), (2, -0.1), (2, math.nan)])
def test_a_draft_that_cannot_be_is_refused(n: int, rate: float) -> None:
    with pytest.raises(ValueError, match="is no draft"):
        expected_tokens_per_step(n, rate)
