"""The figures of the model card."""

from __future__ import annotations

import pytest

from serving.demo.measure import OWN_PROMPTS, Row, distinct_share, held_out_prompts


def test_a_loop_has_few_distinct_4grams() -> None:
    assert distinct_share([1, 2, 3, 4, 5, 6, 7]) == 1.0
    assert distinct_share([1, 2] * 10) == pytest.approx(2 / 17)
    assert distinct_share([1, 2]) == 1.0


def test_the_speed_up_is_the_median_of_the_rounds() -> None:
    row = Row(1, 0.0, 0.7, (0.7,), 0.5, speed_ups=(1.2, 1.9, 1.4))
    assert row.speed_up == 1.4


def test_prompts_are_code_without_their_rest() -> None:
    prompts = held_out_prompts()
    assert len(prompts) == 12
    assert all(prompt.startswith("def ") for prompt in prompts)
    assert len(set(OWN_PROMPTS)) == 6
