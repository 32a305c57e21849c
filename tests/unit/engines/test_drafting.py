"""Counts of drafts, and when they count as collapsed."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter

from serving.engines.drafting import Drafting, read
from serving.engines.watchdog import WINDOW_DRAFTS, WINDOWS_IN_A_ROW, AcceptanceWatch


def drafting(*rates: float, drafts: int = WINDOW_DRAFTS) -> Drafting:
    """`drafts` drafts of one token per rate, each place accepted at its rate."""
    places = tuple(round(rate * drafts) for rate in rates)
    return Drafting(drafts, drafts * len(rates), sum(places), places)


def plus(one: Drafting, other: Drafting) -> Drafting:
    places = zip(one.per_position or (0,) * 9, other.per_position, strict=False)
    return Drafting(
        one.drafts + other.drafts,
        one.drafted + other.drafted,
        one.accepted + other.accepted,
        tuple(sum(place) for place in places),
    )


def verdicts(*windows: Drafting) -> list[str | None]:
    """What the watch says after each window, the last one repeated until it counts."""
    now = Drafting()
    watch = AcceptanceWatch(now)
    said = []
    for window in windows:
        now = plus(now, window)
        said.append(watch.look(now))
    return said


def test_counts_are_read_from_vllms_own_metrics_and_summed_over_its_engines() -> None:
    registry = CollectorRegistry()
    for name, values in (
        ("drafts", (10, 5)),
        ("draft_tokens", (20, 10)),
        ("accepted_tokens", (9, 4)),
    ):
        counter = Counter(f"vllm:spec_decode_num_{name}", "", ["engine"], registry=registry)
        for engine, value in enumerate(values):
            counter.labels(engine).inc(value)
    places = Counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos", "", ["position"], registry=registry
    )
    places.labels("1").inc(5)
    places.labels("0").inc(8)
    assert read(registry) == Drafting(15, 30, 13, (8, 5))


def test_an_engine_that_does_not_draft_has_counted_nothing() -> None:
    assert read(CollectorRegistry()) == Drafting()
    assert Drafting().acceptance == 0
    assert not Drafting().flat_near_one


def test_counts_since_an_earlier_reading_are_their_difference() -> None:
    first, later = drafting(0.8, 0.5), plus(drafting(0.8, 0.5), drafting(0.6, 0.2))
    assert later.since(first) == drafting(0.6, 0.2)
    assert drafting(0.8).since(Drafting()) == drafting(0.8)


@pytest.mark.parametrize(
    ("rates", "flat"),
    [
        ((0.99, 0.97, 0.94), True),
        ((0.72, 0.53, 0.40), False),
        ((0.98, 0.90), False),
        ((0.95,), False),
        ((0.99,), True),
    ],
)
def test_a_text_that_loops_is_accepted_at_every_place(rates: tuple[float, ...], flat: bool) -> None:
    assert drafting(*rates).flat_near_one is flat


def test_healthy_drafting_is_left_alone() -> None:
    assert verdicts(*[drafting(0.7, 0.5)] * 9) == [None] * 9


@pytest.mark.parametrize(
    ("collapsed", "reason"),
    [
        (drafting(0.0, 0.0), "no draft token is accepted"),
        (drafting(0.99, 0.98), "as in a text that loops"),
        (drafting(0.3, 0.2), "acceptance fell from 0.600"),
    ],
)
def test_a_collapse_counts_once_it_lasts(collapsed: Drafting, reason: str) -> None:
    said = verdicts(drafting(0.7, 0.5), *[collapsed] * WINDOWS_IN_A_ROW)
    assert said[:-1] == [None] * WINDOWS_IN_A_ROW
    assert reason in str(said[-1])


def test_a_collapse_ends_with_the_first_healthy_window() -> None:
    said = verdicts(*[drafting(0.7)] * 2, *[drafting(0.0)] * 4, drafting(0.7))
    assert [text is not None for text in said] == [False] * 4 + [True, True, False]


def test_fewer_drafts_than_a_window_change_nothing() -> None:
    watch = AcceptanceWatch(Drafting())
    for drafts in range(0, WINDOW_DRAFTS, 10):
        assert watch.look(drafting(0.0, drafts=drafts)) is None
    assert watch.window is None
