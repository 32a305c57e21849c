"""A drafting variant closes at once and comes back late."""

from __future__ import annotations

import math

from serving.router.gates import Gates
from serving.router.settings import Routing

ROUTING = Routing(return_at=0.75, dwell_s=2.0)
GATE = ("m", "mtp")


def opened(gates: Gates, level: float, now: float, gate: tuple[str, str] = GATE) -> bool:
    return gates.is_open(gate, level, 8, ROUTING, now)


def test_a_gate_closes_at_the_crossover_and_not_below() -> None:
    gates = Gates()
    assert [opened(gates, level, 0) for level in (0, 7.99, 8)] == [True, True, False]


def test_it_opens_again_at_three_quarters_of_it() -> None:
    gates = Gates()
    opened(gates, 8, now=0)
    seen = [opened(gates, level, now) for level, now in ((6.1, 10), (6.0, 12), (7.9, 12))]
    assert seen == [False, True, True]


def test_it_stays_closed_for_the_dwell_time_however_idle() -> None:
    gates = Gates()
    opened(gates, 8, now=100)
    assert [opened(gates, 0, now) for now in (100, 101.9, 102)] == [False, False, True]


def test_a_load_that_dips_for_less_than_the_dwell_time_opens_nothing() -> None:
    gates = Gates()
    opened(gates, 8, now=0)
    seen = [opened(gates, level, now) for level, now in ((2, 1.9), (7, 2), (2, 3.9), (2, 4))]
    assert seen == [False, False, False, True]


def test_gates_of_other_variants_are_their_own() -> None:
    gates = Gates()
    opened(gates, 8, now=0)
    assert opened(gates, 1, now=0, gate=("m", "mtp-1"))


def test_a_gate_without_a_limit_never_closes() -> None:
    assert Gates().is_open(GATE, 1_000, math.inf, ROUTING, 0)


def test_a_load_that_swings_about_the_crossover_does_not_flap() -> None:
    gates = Gates()
    seen = [opened(gates, 8 if second % 2 else 7, now=second) for second in range(20)]
    assert seen == [True] + [False] * 19
