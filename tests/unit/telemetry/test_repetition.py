"""Loops are told from text."""

from __future__ import annotations

import pytest

from serving.telemetry.repetition import distinct_4grams


def test_a_loop_has_few_distinct_4grams() -> None:
    assert distinct_4grams([1, 2, 3, 4, 5, 6, 7]) == 1
    assert distinct_4grams([1, 2] * 10) == pytest.approx(2 / 17)
    assert distinct_4grams(["a", "b"] * 6) == pytest.approx(2 / 9)


def test_a_text_shorter_than_one_of_them_has_no_share() -> None:
    assert distinct_4grams([1, 2, 3]) is None
