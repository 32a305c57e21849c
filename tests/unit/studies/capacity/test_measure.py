"""The order of the rounds."""

from __future__ import annotations

from collections import Counter

from serving.studies.capacity.measure import BURST, PACED, WHOLE, Plan, order, workloads

NAMES = ("direct", "relay", "app", "deployed")
LOADS = (WHOLE, PACED, BURST)


def test_every_target_is_measured_under_every_load_in_every_round() -> None:
    turns = list(order(NAMES, Plan(rounds=3), LOADS))
    assert Counter((number, load) for number, load, _ in turns) == Counter(
        (number, load) for number in range(3) for load in LOADS
    )
    assert all(sorted(names) == sorted(NAMES) for _, _, names in turns)


def test_the_order_is_drawn_by_the_seed() -> None:
    first = list(order(NAMES, Plan(seed=1), LOADS))
    assert first == list(order(NAMES, Plan(seed=1), LOADS))
    assert first != list(order(NAMES, Plan(seed=2), LOADS))
    assert len({tuple(names) for _, _, names in first}) > 1


def test_only_paced_streams_pause() -> None:
    loads = workloads(Plan(delay_ms=7))
    assert [(load.name, load.stream, load.pause_ms) for load in loads] == [
        (WHOLE, False, 0),
        (PACED, True, 7),
        (BURST, True, 0),
    ]
