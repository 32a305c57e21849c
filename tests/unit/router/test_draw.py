"""Draws by a key: even, lasting, and moved no more than needed."""

from __future__ import annotations

from collections import Counter

import pytest

from serving.router.draw import pick, unit

KEYS = [f"session {number}" for number in range(10_000)]


def test_units_are_even_over_keys_and_inside_the_interval() -> None:
    units = [unit(key, "p") for key in KEYS]
    assert 0 < min(units) < 0.01 < 0.99 < max(units) < 1
    assert sum(units) / len(units) == pytest.approx(0.5, abs=0.01)


def test_a_key_draws_the_same_for_one_purpose_and_independently_for_another() -> None:
    assert unit("k", "p") == unit("k", "p")
    both = sum(unit(key, "p") < 0.5 and unit(key, "q") < 0.5 for key in KEYS)
    assert both / len(KEYS) == pytest.approx(0.25, abs=0.02)


def test_a_draw_is_the_same_in_every_process() -> None:
    assert unit("session", "study") == 0.6147258870472765


def test_each_name_gets_its_part_of_the_keys() -> None:
    counts = Counter(pick({"a": 90, "b": 8, "c": 2}, key, "m") for key in KEYS)
    shares = {name: n / len(KEYS) for name, n in counts.items()}
    assert shares == pytest.approx({"a": 0.9, "b": 0.08, "c": 0.02}, abs=0.01)


def test_a_canary_that_grows_takes_keys_and_moves_no_others() -> None:
    before = [pick({"a": 50, "b": 40, "canary": 5}, key, "m") for key in KEYS]
    after = [pick({"a": 50, "b": 40, "canary": 20}, key, "m") for key in KEYS]
    moved = {new for old, new in zip(before, after, strict=True) if old != new}
    assert moved == {"canary"}
