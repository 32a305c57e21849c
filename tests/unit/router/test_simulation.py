"""The simulated fleet: its arithmetic, that nobody starves, and what routing gains in it."""

from __future__ import annotations

import random

import pytest

from serving.router import simulation
from serving.router.settings import Routing
from serving.router.simulation import (
    LEVELS,
    MTP,
    MTP_STEPS,
    MTP_TOKENS,
    PLAIN,
    PLAIN_STEPS,
    SLOTS,
    Figures,
    Fleet,
    Simulation,
    crossover,
    fleets,
    speed_of,
)

SPEEDS = {MTP: speed_of(MTP_STEPS, MTP_TOKENS), PLAIN: speed_of(PLAIN_STEPS, 1)}


def run(fleet: Fleet, peak: int = 32, requests: int = 3_000) -> Figures:
    return Simulation(fleet, SPEEDS, requests, peak, seed=0).run()


@pytest.fixture(scope="module")
def found() -> list[Figures]:
    return [run(fleet) for fleet in fleets(10, crossover(SPEEDS[MTP], SPEEDS[PLAIN]))]


@pytest.mark.parametrize(
    ("running", "tokens_per_s"), [(1, 200.0), (2, 160.0), (3, 400 / 3), (5, 100.0)]
)
def test_a_speed_lies_on_a_line_between_two_steps_and_beyond_them(
    running: int, tokens_per_s: float
) -> None:
    speed = speed_of("1:10,3:15", 2)
    assert speed(running) == pytest.approx(tokens_per_s)


@pytest.mark.parametrize("steps", ["", "1:10", "1:10,1:12", "1:10,x", "1:10:3,2:4", "a:1,b:2"])
def test_steps_that_cannot_be_read_name_the_cure(steps: str) -> None:
    with pytest.raises(ValueError, match="write two points or more"):
        speed_of(steps, 1)


def test_the_crossover_is_where_plain_becomes_faster() -> None:
    mtp, plain = speed_of("1:10,2:20", 2), speed_of("1:15,2:15", 1)
    assert crossover(mtp, plain) == 4
    assert crossover(mtp, speed_of("1:10,2:20", 1)) is None


def test_one_request_takes_its_tokens_at_the_speed_of_one() -> None:
    fleet = Fleet("one", 1, 1, PLAIN)
    figures = run(fleet, peak=1, requests=1)
    _, tokens = next(simulation._traffic(random.Random(2)))
    assert figures.seconds == pytest.approx(tokens / SPEEDS[PLAIN](1))


def test_every_request_is_answered_and_the_tokens_are_those_asked_for(
    found: list[Figures],
) -> None:
    traffic = simulation._traffic(random.Random(2))
    asked = sum(next(traffic)[1] for _ in range(3_000))
    for each in found:
        assert each.finished == each.requests == sum(each.rules.values()) == 3_000
        assert sum(each.tokens_by_level.values()) == pytest.approx(asked)
        assert sum(each.seconds_by_level.values()) == pytest.approx(each.seconds)


def test_the_router_drafts_below_the_crossover_and_much_less_above(found: list[Figures]) -> None:
    routed = found[2]
    assert routed.drafting_share(LEVELS[2]) > 0.8
    assert routed.drafting_share(LEVELS[-1]) < 0.5
    assert set(routed.rules) == {"load", "structured", "short-output"}


def test_routing_serves_more_than_one_variant_of_the_same_stack_alone(
    found: list[Figures],
) -> None:
    _, all_plain, routed, half_idle = found
    assert routed.seconds < all_plain.seconds < half_idle.seconds


def test_under_more_than_all_slots_nobody_starves() -> None:
    routed = run(fleets(4, 18)[2], peak=2 * SLOTS, requests=4_000)
    assert routed.finished == 4_000
    assert routed.longest_wait["load"] > 0
    # Whoever may go to one variant only waits no longer than twice the others' longest wait.
    assert max(routed.longest_wait.values()) < 2 * routed.longest_wait["load"]


def test_the_same_seed_gives_the_same_run() -> None:
    fleet = Fleet("again", 2, 2, MTP, Routing(crossover_streams={MTP: 18}))
    first, second = (run(fleet, requests=300) for _ in range(2))
    assert (first.seconds, first.waits, first.rules) == (
        second.seconds,
        second.waits,
        second.rules,
    )


def test_the_command_prints_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    simulation.main(["--replicas", "4", "--requests", "200", "--peak", "8"])
    printed = capsys.readouterr().out
    assert printed.startswith(
        "4 replicas, 200 requests, 1 to 8 to 1 in flight per replica, seed 0; crossover 18\n"
    )
    assert "load-aware, half each: 200 of 200 requests answered" in printed


@pytest.mark.parametrize("arguments", [["--replicas", "1"], ["--plain", "1:2"]])
def test_arguments_that_cannot_be_used_are_told(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        simulation.main(arguments)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err
