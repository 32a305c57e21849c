"""Which variant the rules choose, by which word, and what else is decided."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from serving.router.choose import Decision, Router
from serving.router.request import RouteRequest
from serving.router.rules import RULES, WORDS, Load
from serving.router.settings import Routing, Shadow, Split
from serving.router.table import ModelRoute, UnknownModelError, VariantRoute

READY = Load(0, 1)


def never() -> float:
    raise AssertionError("nothing random was to be decided")


def counting() -> Callable[[], float]:
    """Numbers in [0, 1) that are spread evenly, in place of random ones."""
    numbers = itertools.count()
    return lambda: (next(numbers) * 0.618034) % 1


def route(name: str, context: int = 4096, slots: int | None = 16) -> VariantRoute:
    drafts = {"method": "mtp"} if name.startswith("mtp") else None
    return VariantRoute(
        variant=name,
        app_name=name,
        max_model_len=context,
        speculative=drafts,
        max_num_seqs=slots,
    )


def model(*variants: VariantRoute | str, default: str | None = None, **routing: Any) -> ModelRoute:
    routes = tuple(route(each) if isinstance(each, str) else each for each in variants)
    return ModelRoute(
        id="m",
        default_variant=default or routes[0].variant,
        variants=routes,
        routing=Routing(**routing),
    )


def choose(
    served: ModelRoute,
    loads: Mapping[str, Load] | None = None,
    *,
    router: Router | None = None,
    now: float = 0.0,
    **request: Any,
) -> Decision:
    asked = RouteRequest("m", **{"session": "s", **request})
    found = {each.variant: READY for each in served.variants} | dict(loads or {})
    return (router or Router(never)).choose(served, asked, found, now)


def chosen(*arguments: Any, **more: Any) -> tuple[str, str]:
    decision = choose(*arguments, **more)
    return decision.variant, decision.rule


LOAD_AWARE = model("mtp", "plain", crossover_streams={"mtp": 8})


# --- named ----------------------------------------------------------------------------------


def test_a_named_variant_wins_over_every_rule() -> None:
    served = model("mtp", "plain", structured="plain", crossover_streams={"mtp": 8})
    asked = {"variant": "mtp", "header_variant": "plain", "structured": True}
    assert chosen(served, {"mtp": Load(99, 1)}, **asked) == ("mtp", "explicit")


def test_a_named_variant_is_kept_though_it_is_not_ready() -> None:
    assert chosen(LOAD_AWARE, {"mtp": Load(0, 0)}, header_variant="mtp") == ("mtp", "header")


@pytest.mark.parametrize("asked", [{"variant": "fast"}, {"variant": ""}, {"header_variant": "x"}])
def test_a_variant_that_is_not_there_is_an_error(asked: dict[str, str]) -> None:
    with pytest.raises(UnknownModelError, match="it has: mtp, plain"):
        choose(LOAD_AWARE, **asked)


@pytest.mark.parametrize("load", [Load(99, 1), Load(0, 0)])
def test_what_continues_a_response_goes_to_the_variant_that_holds_it(load: Load) -> None:
    split = Split(study="s", arms=("mtp", "plain"), share=1.0)
    served = model("mtp", "plain", split=split, shadow=Shadow(variant="plain", share=1.0))
    got = choose(served, {"mtp": load}, held_by="mtp", previous_response="resp_1")
    assert (got.variant, got.rule, got.shadow, got.arm) == ("mtp", "response", None, None)
    assert got.steps[0].why == "it holds resp_1"


def test_a_named_variant_wins_over_the_one_that_holds_the_response() -> None:
    assert chosen(LOAD_AWARE, variant="plain", held_by="mtp") == ("plain", "explicit")


def test_a_variant_that_is_no_longer_served_holds_nothing() -> None:
    assert chosen(LOAD_AWARE, held_by="mtp-9", previous_response="resp_1") == ("mtp", "load")


# --- nothing configured ---------------------------------------------------------------------


def test_without_rules_the_default_variant_answers() -> None:
    assert chosen(model("mtp", "plain", default="plain")) == ("plain", "default")


def test_the_study_s_best_variant_comes_before_the_default_one() -> None:
    served = model("mtp", "mtp-1", "plain", preferred="plain")
    assert chosen(served) == ("plain", "default")


def test_one_variant_needs_no_rule() -> None:
    got = choose(model("mtp", structured="plain"), structured=True)
    assert (got.variant, got.rule, got.steps) == ("mtp", "default", ())


# --- what a request needs -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("routing", "request_", "expected"),
    [
        ({"structured": "plain"}, {"structured": True}, ("plain", "structured")),
        ({"structured": "any"}, {"structured": True}, ("mtp", "default")),
        ({"structured": "plain"}, {}, ("mtp", "default")),
        ({"tools": "plain"}, {"forced_tool": True}, ("plain", "tools")),
        ({"tools": "any"}, {"forced_tool": True}, ("mtp", "default")),
        ({"context_tokens": 500}, {"prompt_tokens": 501}, ("plain", "long-prompt")),
        ({"context_tokens": 500}, {"prompt_tokens": 500}, ("mtp", "default")),
        ({"break_even_output_tokens": 20}, {"max_tokens": 19}, ("plain", "short-output")),
        ({"break_even_output_tokens": 20}, {"max_tokens": 20}, ("mtp", "default")),
        ({"break_even_output_tokens": 20}, {}, ("mtp", "default")),
        ({"by_category": {"prose": "plain"}}, {"category": "prose"}, ("plain", "category")),
        ({"by_category": {"prose": "plain"}}, {"category": "code"}, ("mtp", "default")),
        ({"by_category": {"prose": "plain"}}, {}, ("mtp", "default")),
    ],
)
def test_a_request_s_needs_decide(
    routing: dict[str, Any], request_: dict[str, Any], expected: tuple[str, str]
) -> None:
    assert chosen(model("mtp", "plain", **routing), **request_) == expected


def test_a_request_goes_where_the_context_holds_prompt_and_answer() -> None:
    served = model(route("mtp", context=1_000), route("plain", context=2_000))
    assert chosen(served, prompt_tokens=900, max_tokens=100) == ("mtp", "default")
    assert chosen(served, prompt_tokens=900, max_tokens=101) == ("plain", "long-prompt")
    assert chosen(served, prompt_tokens=9_000) == ("mtp", "default")


def test_a_need_that_no_variant_meets_is_passed_over() -> None:
    served = model("mtp-1", "mtp-2", structured="plain", default="mtp-2")
    assert chosen(served, structured=True) == ("mtp-2", "default")


# --- load -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("running", "replicas", "expected"),
    [(0, 1, "mtp"), (7, 1, "mtp"), (8, 1, "plain"), (15, 2, "mtp"), (16, 2, "plain")],
)
def test_drafting_goes_on_below_the_crossover_of_each_replica(
    running: int, replicas: int, expected: str
) -> None:
    assert chosen(LOAD_AWARE, {"mtp": Load(running, replicas)}) == (expected, "load")


def test_a_crossover_beyond_the_engine_s_slots_ends_there() -> None:
    served = model(route("mtp", slots=4), "plain", crossover_streams={"mtp": 8})
    assert chosen(served, {"mtp": Load(4, 1)}) == ("plain", "load")


def test_without_a_crossover_only_the_slots_end_it() -> None:
    served = model("mtp", "plain", crossover_streams={"mtp": None})
    assert chosen(served, {"mtp": Load(15, 1)}) == ("mtp", "load")
    assert chosen(served, {"mtp": Load(16, 1)}) == ("plain", "load")


def test_the_way_back_to_drafting_is_kept_from_flapping() -> None:
    router = Router(never)
    seen = [
        choose(LOAD_AWARE, {"mtp": Load(running, 1)}, router=router, now=now).variant
        for running, now in [(8, 0), (6, 1), (7, 2), (0, 3.9), (6, 4), (7, 4)]
    ]
    assert seen == ["plain", "plain", "plain", "plain", "mtp", "mtp"]


def test_where_variants_share_a_device_all_the_models_requests_count() -> None:
    shared = model("mtp", "plain", crossover_streams={"mtp": 8}, crossover_counts="model")
    loads = {"mtp": Load(3, 1), "plain": Load(5, 1)}
    assert chosen(shared, loads) == ("plain", "load")
    assert chosen(LOAD_AWARE, loads) == ("mtp", "load")
    assert chosen(shared, {"mtp": Load(5, 2), "plain": Load(5, 1)}) == ("mtp", "load")


def test_a_new_routing_table_does_not_open_what_is_closed() -> None:
    router = Router(never)
    choose(LOAD_AWARE, {"mtp": Load(8, 1)}, router=router)
    other = model("mtp", "plain", crossover_streams={"mtp": 8}, tools="plain")
    assert choose(other, {"mtp": Load(0, 1)}, router=router, now=1).variant == "plain"


def test_several_drafting_variants_are_taken_in_their_order() -> None:
    served = model("mtp-3", "mtp-1", "plain", crossover_streams={"mtp-3": 2, "mtp-1": 8})
    seen = [
        chosen(served, {"mtp-3": Load(three, 1), "mtp-1": Load(one, 1)})[0]
        for three, one in [(1, 0), (2, 0), (2, 8)]
    ]
    assert seen == ["mtp-3", "mtp-1", "plain"]


def test_nobody_waits_for_plain_while_drafting_has_a_free_slot() -> None:
    got = choose(LOAD_AWARE, {"mtp": Load(8, 1), "plain": Load(16, 1)})
    assert (got.variant, got.rule) == ("mtp", "load")
    assert got.steps[-1].why == (
        "mtp has 8 running per replica, closed until 6; nothing plain has room"
    )


def test_where_all_slots_are_taken_the_shorter_queue_is_chosen() -> None:
    assert chosen(LOAD_AWARE, {"mtp": Load(17, 1), "plain": Load(18, 1)})[0] == "mtp"
    assert chosen(LOAD_AWARE, {"mtp": Load(18, 1), "plain": Load(17, 1)})[0] == "plain"
    assert chosen(LOAD_AWARE, {"mtp": Load(18, 1), "plain": Load(18, 1)})[0] == "plain"


def test_a_category_s_drafting_variant_gives_way_to_load() -> None:
    served = model(
        "mtp-3",
        "mtp-1",
        "plain",
        crossover_streams={"mtp-3": 4, "mtp-1": 8},
        by_category={"code": "mtp-1"},
    )
    assert chosen(served, category="code") == ("mtp-1", "load")
    assert chosen(served, {"mtp-1": Load(8, 1)}, category="code") == ("plain", "load")


# --- weights --------------------------------------------------------------------------------


def test_weights_share_the_traffic_and_a_session_keeps_its_variant() -> None:
    served = model("plain", "canary", weights={"plain": 80, "canary": 20})
    seen = [choose(served, session=f"s{n % 500}").variant for n in range(2_000)]
    assert seen[:500] == seen[500:1_000]
    assert Counter(seen)["canary"] / 2_000 == pytest.approx(0.2, abs=0.04)


def test_without_a_session_each_request_is_drawn_anew() -> None:
    served = model("plain", "canary", weights={"plain": 1, "canary": 1})
    router = Router(counting())
    seen = [choose(served, router=router, session=None) for _ in range(200)]
    assert {each.rule for each in seen} == {"weight"}
    assert 80 < Counter(each.variant for each in seen)["canary"] < 120


def test_weights_between_plain_variants_leave_drafting_to_the_load() -> None:
    served = model(
        "mtp",
        "plain",
        "canary",
        crossover_streams={"mtp": 8},
        weights={"plain": 1, "canary": 1},
    )
    below = {choose(served, session=f"s{n}").variant for n in range(50)}
    above = {choose(served, {"mtp": Load(8, 1)}, session=f"s{n}").variant for n in range(50)}
    assert (below, above) == ({"mtp"}, {"plain", "canary"})


def test_weights_share_out_only_what_may_answer() -> None:
    served = model("mtp", "plain", weights={"mtp": 99, "plain": 1}, structured="plain")
    assert chosen(served, structured=True) == ("plain", "structured")


# --- split and shadow -----------------------------------------------------------------------

STUDY = Split(study="live-1", arms=("mtp", "plain"), share=0.2)


def test_a_share_of_the_sessions_takes_part_in_a_study_with_equal_arms() -> None:
    served = model("mtp", "plain", split=STUDY)
    seen = [choose(served, session=f"s{n}") for n in range(4_000)]
    arms = Counter(each.arm for each in seen if each.rule == "split")
    assert arms["mtp"] / 4_000 == pytest.approx(0.1, abs=0.015)
    assert arms["plain"] / 4_000 == pytest.approx(0.1, abs=0.015)
    assert all(each.arm is None for each in seen if each.rule != "split")
    assert all(each.variant == each.arm for each in seen if each.arm)


def test_a_session_stays_in_its_arm() -> None:
    served = model("mtp", "plain", split=STUDY.model_copy(update={"share": 1.0}))
    assert len({choose(served, session="s").arm for _ in range(20)}) == 1


@pytest.mark.parametrize(
    ("loads", "request_"),
    [({"plain": Load(0, 0)}, {}), ({}, {"structured": True}), ({}, {"variant": "mtp"})],
)
def test_a_study_has_only_requests_that_every_arm_could_answer(
    loads: dict[str, Load], request_: dict[str, Any]
) -> None:
    served = model(
        "mtp", "plain", structured="plain", split=STUDY.model_copy(update={"share": 1.0})
    )
    assert choose(served, loads, **request_).arm is None


def test_a_study_comes_before_what_is_only_faster() -> None:
    served = model(
        "mtp",
        "plain",
        crossover_streams={"mtp": 8},
        break_even_output_tokens=50,
        split=STUDY.model_copy(update={"share": 1.0}),
    )
    seen = {choose(served, session=f"s{n}", max_tokens=5).arm for n in range(20)}
    assert seen == {"mtp", "plain"}


def test_a_share_of_the_requests_is_repeated_to_the_shadow() -> None:
    served = model("mtp", "plain", shadow=Shadow(variant="plain", share=0.25))
    router = Router(counting())
    seen = Counter(choose(served, router=router).shadow for _ in range(400))
    assert seen["plain"] == pytest.approx(100, abs=4)
    assert seen[None] == 400 - seen["plain"]


@pytest.mark.parametrize(
    ("shadow", "load", "request_"),
    [
        ("mtp", READY, {}),
        ("plain", Load(0, 0), {}),
        ("plain", Load(16, 1), {}),
        ("plain", READY, {"variant": "mtp"}),
    ],
)
def test_nothing_is_repeated_where_it_is_the_same_unready_full_or_named(
    shadow: str, load: Load, request_: dict[str, Any]
) -> None:
    served = model("mtp", "plain", shadow=Shadow(variant=shadow, share=1.0))
    assert choose(served, {shadow: load}, **request_).shadow is None


# --- readiness ------------------------------------------------------------------------------


def test_a_variant_that_is_not_ready_is_avoided() -> None:
    assert chosen(LOAD_AWARE, {"mtp": Load(0, 0)}) == ("plain", "fallback")


def test_what_is_only_fast_enough_when_ready_keeps_its_word() -> None:
    assert chosen(LOAD_AWARE, {"plain": Load(0, 0)}) == ("mtp", "load")


def test_a_variant_that_nobody_reports_on_counts_as_not_ready() -> None:
    got = Router(never).choose(
        LOAD_AWARE, RouteRequest("m", session="s"), {"plain": READY}, now=0.0
    )
    assert (got.variant, got.rule) == ("plain", "fallback")


def test_the_rules_hold_among_those_that_are_ready() -> None:
    served = model("mtp-2", "mtp-1", "plain", crossover_streams={"mtp-2": 8, "mtp-1": 8})
    loads = {"mtp-2": Load(0, 0), "mtp-1": Load(8, 1)}
    assert chosen(served, loads) == ("plain", "fallback")


def test_where_none_is_ready_the_choice_stands() -> None:
    loads = {"mtp": Load(0, 0), "plain": Load(0, 0)}
    assert chosen(LOAD_AWARE, loads) == ("mtp", "load")


def test_a_request_waits_for_a_context_that_holds_it_rather_than_be_refused() -> None:
    served = model(route("mtp", context=1_000), route("plain", context=2_000))
    assert chosen(served, {"plain": Load(0, 0)}, prompt_tokens=1_500) == ("plain", "long-prompt")


# --- reasons --------------------------------------------------------------------------------


def test_every_step_tells_what_it_left_and_why() -> None:
    served = model("mtp", "plain", crossover_streams={"mtp": 8}, by_category={"a": "mtp"})
    got = choose(served, {"mtp": Load(9, 1)}, category="a", max_tokens=64, prompt_tokens=7)
    both = ("mtp", "plain")
    assert [tuple(step) for step in got.steps] == [
        ("long-prompt", both, "about 7 tokens of prompt"),
        ("structured", both, "no grammar is asked for"),
        ("tools", both, "no tool call is forced"),
        ("split", both, "no study runs"),
        ("short-output", both, "no break-even length is set"),
        ("category", both, "'a' wants mtp"),
        ("weight", both, "no two variants share the traffic"),
        ("load", ("plain",), "mtp has 9 running per replica, closed until 6"),
    ]


def test_every_rule_has_a_word_with_an_explanation() -> None:
    named = {"explicit", "header", "response", "default", "fallback"}
    assert set(WORDS) == {rule.word for rule in RULES} | named


def test_a_decision_changes_nothing_but_the_gates() -> None:
    loads = {"mtp": Load(3, 1), "plain": Load(1, 1)}
    before = dict(loads)
    first, second = (choose(LOAD_AWARE, loads) for _ in range(2))
    assert (first, loads) == (second, before)
