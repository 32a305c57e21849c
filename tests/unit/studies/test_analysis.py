"""From records to findings, flags and one honest sentence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serving.studies.analysis import analyse
from serving.studies.analysis.answer import answer, headline
from serving.studies.analysis.findings import Analysis, Flag, Setting, Speedup
from serving.studies.analysis.loads import busy_seconds
from serving.studies.records import (
    Arm,
    Drafting,
    Event,
    EventKind,
    RequestRecord,
    Run,
    StudyRecord,
    append_request,
    write_study,
)
from serving.studies.statistics import Estimate, proportion

PROMPTS = ("p1", "p2", "p3", "p4", "p5", "p6")
NS = {"plain": 0, "mtp1": 1, "mtp2": 2, "mtp3": 3}


def study(*names: str, **fields: Any) -> StudyRecord:
    given: dict[str, Any] = {
        "id": "n-sweep-1",
        "name": "n-sweep",
        "question": "Which n is best?",
        "arms": tuple(
            Arm(name=name, url="http://127.0.0.1:1/v1", model="tiny-moe", draft_tokens=NS[name])
            for name in names
        ),
        "plain": "plain",
        "gpu": "cpu",
        "environment": {"vllm": "0.32.0"},
        "spec": {},
        "started_at": 0.0,
    }
    return StudyRecord(**given | fields)


def record(arm: str = "plain", prompt: str = "p1", **fields: Any) -> RequestRecord:
    """101 tokens of 10 ms each after 0.5 s, unless told otherwise: 1.5 s in all."""
    tpot = fields.pop("tpot", 0.01)
    tokens = fields.get("completion_tokens", 101)
    ttft = fields.get("ttft_s", 0.5)
    given: dict[str, Any] = {
        "cell": "c",
        "round": 0,
        "arm": arm,
        "draft_tokens": NS[arm],
        "streams": 1,
        "category": "code",
        "prompt": prompt,
        "temperature": 0.0,
        "max_tokens": 101,
        "sent_at": 0.0,
        "outcome": "ok",
        "ttft_s": ttft,
        "duration_s": ttft + tpot * (tokens - 1),
        "prompt_tokens": 20,
        "completion_tokens": tokens,
    }
    return RequestRecord(**given | fields)


def answers(arm: str, tpots: Iterable[float], **fields: Any) -> list[RequestRecord]:
    """One answer per time, to as many different prompts."""
    return [
        record(arm, prompt, tpot=tpot, **fields)
        for prompt, tpot in zip(PROMPTS, tpots, strict=False)
    ]


def run(*requests: RequestRecord, **fields: Any) -> Run:
    names = [name for name in NS if any(each.arm == name for each in requests)]
    return Run(study(*names, **fields), requests)


def only(analysis: Analysis, category: str | None = "code") -> Speedup:
    (found,) = (each for each in analysis.speedups if each.setting.category == category)
    return found


def flags(found: Run) -> dict[str, Flag]:
    return {each.name: each for each in analyse(found).flags}


PLAIN = answers("plain", [0.01] * 6)
"""Six prompts, 100 tokens/s each."""


# Speed-ups


def test_a_speed_up_is_paired_by_prompt_and_round() -> None:
    # p3 was answered by one arm only; both others were twice as fast, one slow for both.
    found = only(
        analyse(
            run(
                record("plain", "p1", tpot=0.01),
                record("plain", "p2", tpot=0.08),
                record("mtp2", "p1", tpot=0.005),
                record("mtp2", "p2", tpot=0.04),
                record("mtp2", "p3", tpot=0.001),
                record("mtp2", "p1", tpot=0.001, round=1),
            )
        )
    )
    assert (found.arm, found.setting) == ("mtp2", Setting("code", 1, 101, 0.0))
    assert (found.pairs, found.prompts) == (2, 2)
    assert found.decode is not None
    assert (found.decode.value, found.decode.low, found.decode.high) == pytest.approx((2, 2, 2))


def test_end_to_end_counts_the_prompts_time_too() -> None:
    # 0.5 + 100 * 0.01 = 1.5 s beside 0.5 + 100 * 0.005 = 1.0 s.
    found = only(analyse(run(*PLAIN, *answers("mtp2", [0.005] * 6))))
    assert found.end_to_end.value == pytest.approx(1.5)


def test_the_two_speed_ups_that_people_quote_can_disagree() -> None:
    # Decode rates 100 and 100 beside 400 and 50: the means say 450 / 200 = 2.25. The times
    # without TTFT, 1 + 1 s beside 0.25 + 2 s, say 2 / 2.25 = 0.889.
    found = only(
        analyse(
            run(
                *answers("plain", [0.01, 0.01], ttft_s=0.0),
                *answers("mtp3", [0.0025, 0.02], ttft_s=0.0),
            )
        )
    )
    assert found.by_mean_tokens_per_s == pytest.approx(2.25)
    assert found.by_wall_clock == pytest.approx(2 / 2.25)


def test_several_answers_to_one_prompt_in_one_round_count_once() -> None:
    twice = [record("mtp2", "p1", tpot=0.004), record("mtp2", "p1", tpot=0.006)]
    found = only(analyse(run(record("plain", "p1"), *twice)))
    # The median of 250 and 166.7 tokens/s over 100.
    assert found.pairs == 1
    assert found.decode == Estimate(pytest.approx((250 + 1 / 0.006) / 2 / 100), None, None)


def test_plains_last_pass_is_in_no_speed_up_and_no_load() -> None:
    last = answers("plain", [0.1] * 6, again=True, sent_at=100.0)
    analysis, without = (
        analyse(run(*PLAIN, *answers("mtp2", [0.005] * 6), *more)) for more in (last, ())
    )
    assert (analysis.speedups, analysis.loads) == (without.speedups, without.loads)
    assert analysis.measured_tokens == without.measured_tokens + 6 * 101


def test_a_prompt_asked_more_than_once_in_a_round_is_a_pair_but_no_new_prompt() -> None:
    keys = ("p1", "p1#2", "p1#3")
    requests = [record(arm, prompt) for arm in ("plain", "mtp2") for prompt in keys]
    found = only(analyse(run(*requests)))
    assert (found.pairs, found.prompts) == (3, 1)
    assert found.decode == Estimate(1.0, None, None)


def test_a_failed_request_is_in_no_pair_but_among_the_errors() -> None:
    cut = record("mtp2", "p1", outcome="cut", error="broke off", completion_tokens=9)
    analysis = analyse(run(*PLAIN, cut, *answers("mtp2", [0.005] * 6)[1:]))
    assert only(analysis).pairs == 5
    (load,) = (each for each in analysis.loads if each.arm == "mtp2")
    assert (load.requests, load.errors) == (6, 1)
    assert flags(run(*PLAIN, cut))["errors"] == Flag(
        "errors",
        "1 of 1 requests to mtp2 failed: 1 cut",
        "mtp2",
        numbers={"requests": 1, "errors": 1, "cut": 1},
    )


def test_categories_are_told_apart_and_together() -> None:
    analysis = analyse(
        run(
            *PLAIN,
            *answers("plain", [0.01] * 6, category="chat"),
            *answers("mtp2", [0.005] * 6),
            *answers("mtp2", [0.01] * 6, category="chat"),
        )
    )
    by_category = {each.setting.category: each.decode for each in analysis.speedups}
    assert by_category["code"] == Estimate(*[pytest.approx(2)] * 3)
    assert by_category["chat"] == Estimate(*[pytest.approx(1)] * 3)
    # Six rates of 200 and six of 100 tokens/s: the median is 150.
    assert by_category[None] is not None
    assert by_category[None].value == pytest.approx(1.5)


def test_one_token_answers_have_an_end_to_end_speed_up_only() -> None:
    requests = [
        record(arm, completion_tokens=1, ttft_s=ttft) for arm, ttft in (("plain", 1), ("mtp2", 2))
    ]
    found = only(analyse(run(*requests)))
    assert (found.decode, found.by_mean_tokens_per_s) == (None, None)
    assert found.end_to_end == Estimate(0.5)


# Throughput and latency


def test_a_loads_figures_are_those_of_its_answers() -> None:
    requests = [
        record("plain", prompt, tpot=tpot, ttft_s=ttft, streams=2)
        for prompt, tpot, ttft in (("p1", 0.01, 0.5), ("p2", 0.02, 0.1), ("p3", 0.03, 0.3))
    ]
    (load,) = analyse(run(*requests)).loads
    assert load.setting == Setting(None, 2, 101, 0.0)
    # They ran at once, the longest 0.3 + 100 * 0.03 = 3.3 s: 303 tokens in 3.3 s.
    assert load.tokens_per_s == pytest.approx(303 / 3.3)
    # 95 % of the way over three ranks is rank 1.9: 0.02 + 0.9 * 0.01, and 0.3 + 0.9 * 0.2.
    assert (load.tpot_median_s, load.tpot_p95_s) == pytest.approx((0.02, 0.029))
    assert (load.ttft_median_s, load.ttft_p95_s) == pytest.approx((0.3, 0.48))


def test_a_load_without_an_answer_has_no_figures() -> None:
    refused = record(outcome="refused", status=503).model_copy(
        update={"ttft_s": None, "duration_s": None, "completion_tokens": None}
    )
    (load,) = analyse(run(refused)).loads
    assert (load.errors, load.tokens_per_s, load.ttft_median_s, load.tpot_p95_s) == (
        1,
        None,
        None,
        None,
    )


def test_a_pause_between_blocks_is_not_busy_time() -> None:
    # 10 to 12 and 11 to 14 overlap: 4 s; 1,000 to 1,002 is 2 s more.
    spans = [(1000.0, 2.0), (10.0, 2.0), (11.0, 3.0)]
    requests = [record(sent_at=at, duration_s=seconds) for at, seconds in spans]
    assert busy_seconds(requests) == 6.0


# Acceptance

# Five drafts of 3 tokens each, of which 3, 1, 0, 2 and 3 were accepted.
DRAFTING = Drafting(drafts=5, drafted=15, accepted=9, accepted_per_position=(4, 3, 2))


def test_acceptance_is_summed_over_answers_by_arm_category_and_temperature() -> None:
    none = Drafting(drafts=5, drafted=15, accepted=0, accepted_per_position=(0, 0, 0))
    analysis = analyse(
        run(
            record("mtp3", "p1", drafting=DRAFTING, chunks=51),
            record("mtp3", "p2", drafting=DRAFTING, chunks=31),
            record("mtp3", "p1", drafting=none, temperature=0.7),
        )
    )
    at = {(each.category, each.temperature): each for each in analysis.acceptances}
    assert at.keys() == {("code", 0.0), (None, 0.0), ("code", 0.7), (None, 0.7)}
    found = at["code", 0.0]
    assert (found.drafts, found.drafted, found.accepted) == (10, 30, 18)
    assert found.rate == proportion(18, 30)
    assert found.mean_length == 1 + 18 / 10
    assert found.per_position == (proportion(8, 10), proportion(6, 10), proportion(4, 10))
    assert found.conditional == (proportion(8, 10), proportion(6, 8), proportion(4, 6))
    # 1 + 0.8 + 0.64 + 0.512 if every place were as good as the first; 200 tokens in 80 chunks.
    assert found.expected_tokens_per_step == pytest.approx(2.952)
    assert found.tokens_per_chunk == 2.5
    assert at["code", 0.7].rate.value == 0


def test_a_servers_counters_count_only_where_one_request_ran() -> None:
    counters = DRAFTING.model_copy(update={"source": "counters"})
    analysis = analyse(
        run(
            record("mtp3", "p1", drafting=counters),
            record("mtp3", "p1", drafting=counters, streams=8),
        )
    )
    assert {each.drafts for each in analysis.acceptances} == {5}


def test_counts_that_cannot_be_are_flagged_and_left_out() -> None:
    too_many = Drafting(drafts=5, drafted=15, accepted=16)
    rising = Drafting(drafts=5, drafted=15, accepted=9, accepted_per_position=(3, 4, 2))
    found = run(
        record("mtp3", "p1", drafting=too_many),
        record("mtp3", "p2", drafting=rising),
        record("mtp3", "p3", drafting=DRAFTING),
    )
    acceptance = analyse(found).acceptances[0]
    assert acceptance.drafted == 15
    assert acceptance.per_position == (proportion(4, 5), proportion(3, 5), proportion(2, 5))
    assert flags(found)["acceptance-impossible"].numbers == {"answers": 2}


def test_an_engine_that_counts_no_drafts_has_a_rate_but_no_length() -> None:
    llama = Drafting(drafts=0, drafted=20, accepted=15)
    found = analyse(run(record("mtp2", drafting=llama))).acceptances[0]
    assert (found.rate.value, found.mean_length, found.per_position) == (0.75, None, ())
    assert found.expected_tokens_per_step is None


# Conclusions


def test_the_best_variant_is_no_different_from_one_whose_interval_overlaps() -> None:
    spread = [0.004, 0.005, 0.006, 0.004, 0.005, 0.006]
    analysis = analyse(
        run(
            *PLAIN,
            *answers("mtp1", [0.009] * 6),
            *answers("mtp2", spread),
            *answers("mtp3", [each * 1.02 for each in spread]),
        )
    )
    (best,) = (each for each in analysis.best if each.setting.category == "code")
    assert (best.arm, best.verdict, best.no_difference_from) == ("mtp2", "faster", ("mtp3",))


def test_a_variant_surely_faster_goes_before_one_that_may_be_faster_still() -> None:
    unsure = [0.002, 0.002, 0.002, 0.002, 0.02, 0.02]
    analysis = analyse(run(*PLAIN, *answers("mtp1", [0.008] * 6), *answers("mtp2", unsure)))
    best = analysis.best[0]
    assert (best.arm, best.no_difference_from) == ("mtp1", ("mtp2",))
    assert best.speedup.value == pytest.approx(1.25)


def by_streams(arm: str, tpots: dict[int, float], **fields: Any) -> list[RequestRecord]:
    return [
        each
        for streams, tpot in tpots.items()
        for each in answers(arm, [tpot] * 6, streams=streams, **fields)
    ]


PLAIN_BY_STREAMS = by_streams("plain", dict.fromkeys((1, 2, 4, 8), 0.01))


@pytest.mark.parametrize(
    ("tpots", "gone", "plain_faster"),
    [
        ((0.005, 0.006, 0.01, 0.02), 4, 8),
        ((0.005, 0.006, 0.007, 0.008), None, None),
        ((0.005, 0.02, 0.006, 0.01), 8, None),
        ((0.02, 0.02, 0.01, 0.02), 1, 1),
    ],
    ids=["gone from 4", "never gone", "gone for a while", "never there"],
)
def test_the_crossover_is_where_the_gain_is_gone_for_good(
    tpots: tuple[float, ...], gone: int | None, plain_faster: int | None
) -> None:
    mtp = by_streams("mtp2", dict(zip((1, 2, 4, 8), tpots, strict=True)))
    analysis = analyse(run(*PLAIN_BY_STREAMS, *mtp))
    (found,) = (each for each in analysis.crossovers if each.category is None)
    assert found.tried == (1, 2, 4, 8)
    assert (found.gain_gone_from, found.plain_faster_from) == (gone, plain_faster)


def test_the_crossover_is_taken_where_most_levels_were_tried() -> None:
    long = [
        *answers("plain", [0.01] * 6, max_tokens=512),
        *answers("mtp2", [0.02] * 6, max_tokens=512),
    ]
    mtp = by_streams("mtp2", {1: 0.005, 2: 0.006, 4: 0.007, 8: 0.008})
    (_, found) = analyse(run(*PLAIN_BY_STREAMS, *mtp, *long)).crossovers
    assert (found.max_tokens, found.tried) == (101, (1, 2, 4, 8))


def by_length(arm: str, tpot: float, ttft: float, lengths: Iterable[int]) -> list[RequestRecord]:
    return [
        each
        for length in lengths
        for each in answers(
            arm, [tpot] * 6, ttft_s=ttft, max_tokens=length, completion_tokens=length
        )
    ]


def test_the_break_even_is_the_shortest_length_from_which_the_variant_wins() -> None:
    # 0.10 + 0.010 (k - 1) beside 0.20 + 0.005 (k - 1): equal at k = 21.
    lengths = (8, 16, 32, 64)
    plain = by_length("plain", 0.01, 0.1, lengths)
    mtp = by_length("mtp2", 0.005, 0.2, lengths)
    analysis = analyse(run(*plain, *mtp))
    (found,) = (each for each in analysis.break_evens if each.category is None)
    assert (found.streams, found.tried) == (1, lengths)
    assert (found.faster_from, found.plain_faster_to) == (32, 16)


def test_without_a_prefill_tax_no_length_is_too_short() -> None:
    lengths = (8, 16)
    plain, mtp = by_length("plain", 0.01, 0.1, lengths), by_length("mtp2", 0.005, 0.1, lengths)
    (_, found) = analyse(run(*plain, *mtp)).break_evens
    assert (found.faster_from, found.plain_faster_to) == (8, None)


def test_energy_is_told_per_token_of_the_arm() -> None:
    analysis = analyse(run(*PLAIN, energy_j={"plain": 1212.0, "mtp2": 5.0}))
    assert analysis.joules_per_token == {"plain": 2.0}


def test_the_variant_of_an_arm_is_what_its_replies_say() -> None:
    analysis = analyse(run(record("plain"), record("mtp2", variant="mtp-two")))
    assert analysis.variants == {"plain": "plain", "mtp2": "mtp-two"}


def test_how_much_was_measured_is_told() -> None:
    analysis = analyse(run(*PLAIN, record("mtp2", prompt_tokens=900)))
    assert (analysis.measured_tokens, analysis.context_tokens) == (7 * 101, 1001)


# Flags


def test_an_undisturbed_run_has_no_flags() -> None:
    drafting = Drafting(drafts=40, drafted=80, accepted=50, accepted_per_position=(30, 20))
    mtp = answers("mtp2", [0.005] * 6, drafting=drafting, distinct_4grams=0.9)
    assert flags(run(*PLAIN, *mtp)) == {}


def test_an_acceptance_of_0_means_that_the_head_is_not_loaded() -> None:
    nothing = Drafting(drafts=30, drafted=60, accepted=0, accepted_per_position=(0, 0))
    found = flags(run(*PLAIN, record("mtp2", drafting=nothing)))["acceptance-zero"]
    assert found == Flag(
        "acceptance-zero",
        "mtp2 accepted none of 60 draft tokens: its draft head is not loaded, or its weights "
        "are missing from the checkpoint",
        "mtp2",
        None,
        {"drafted": 60},
    )


@pytest.mark.parametrize(
    ("places", "flagged"), [((99, 97, 94), True), ((72, 53, 40), False), ((95, 92, 85), False)]
)
def test_an_acceptance_flat_near_1_means_a_loop(
    places: tuple[int, int, int], flagged: bool
) -> None:
    drafting = Drafting(drafts=100, drafted=300, accepted=sum(places), accepted_per_position=places)
    found = flags(run(*PLAIN, record("mtp3", drafting=drafting)))
    assert ("acceptance-flat" in found) is flagged
    if flagged:
        assert found["acceptance-flat"].category == "code"
        assert found["acceptance-flat"].numbers == {
            "place_1": 0.99,
            "place_2": 0.97,
            "place_3": 0.94,
        }


def test_a_variant_that_tells_no_acceptance_is_flagged() -> None:
    assert flags(run(*PLAIN, record("mtp2")))["acceptance-unknown"].arm == "mtp2"


def test_too_few_tokens_and_prompts_are_flagged_by_category() -> None:
    found = flags(run(*PLAIN, *answers("mtp2", [0.005] * 4)))
    assert found["few-tokens"].numbers == {"tokens": 404}
    assert (found["few-tokens"].arm, found["few-tokens"].category) == ("mtp2", "code")
    assert found["few-prompts"].text == (
        "only 4 prompts compared in code: its intervals are unreliable"
    )


@pytest.mark.parametrize(
    ("last", "text"),
    [
        (0.0107, "plain took 7% more time per token at the end of the run than at its start"),
        (0.0093, "plain took 7% less time per token at the end of the run than at its start"),
        (0.0104, None),
    ],
)
def test_a_drift_of_plain_over_5_percent_is_flagged(last: float, text: str | None) -> None:
    middle = answers("plain", [0.05] * 6, round=1, sent_at=50.0)
    late = answers("plain", [last] * 6, again=True, sent_at=100.0)
    found = flags(run(*late, *PLAIN, *middle))
    assert ("drift" in found) is (text is not None)
    if text:
        assert found["drift"].text == text + ": the machine was not steady"
        assert found["drift"].numbers["change"] == pytest.approx(last / 0.01 - 1)


def test_a_text_that_mostly_repeats_itself_is_flagged() -> None:
    loops = [record("plain", prompt, distinct_4grams=0.2) for prompt in PROMPTS]
    assert flags(run(*loops))["text-repeated"].numbers == {"distinct_4grams": 0.2}


def test_what_disturbed_the_run_is_flagged() -> None:
    events = (
        Event(at=1, kind="engine_lost", text="mtp2 does not answer"),
        Event(at=2, kind="engine_back", text="mtp2 answers again after 9 s"),
    )
    found = flags(run(*PLAIN, plain=None, events=events))
    assert found["events"] == Flag(
        "events",
        "the run was disturbed: mtp2 does not answer; mtp2 answers again after 9 s",
        numbers={"events": 2},
    )
    assert "no-plain" in found


@pytest.mark.parametrize("kind", ["interrupted", "resumed", "out_of_time"])
def test_ending_a_run_and_taking_it_up_again_is_no_disturbance(kind: EventKind) -> None:
    assert flags(run(*PLAIN, events=(Event(at=1, kind=kind, text="as asked"),))) == {}


# The answer


def test_the_answer_tells_gain_crossover_and_break_even() -> None:
    lengths = (8, 16, 32)
    plain_short, mtp_short = (
        by_length("plain", 0.01, 0.1, lengths),
        by_length("mtp2", 0.005, 0.2, lengths),
    )
    mtp = by_streams("mtp2", {1: 0.005, 2: 0.006, 4: 0.01, 8: 0.02})
    analysis = analyse(run(*PLAIN_BY_STREAMS, *plain_short, *mtp, *mtp_short))
    assert answer(replace(analysis, flags=())) == (
        "On this machine (cpu), mtp2 decodes 2.00× [2.00, 2.00] as fast as plain at 1 stream; "
        "the gain is gone from 4 streams; use plain for outputs under 32 tokens."
    )


def test_the_answer_names_a_category_that_gains_though_the_average_does_not() -> None:
    analysis = analyse(
        run(
            *PLAIN,
            *answers("plain", [0.01] * 6, category="creative"),
            *answers("mtp2", [0.005] * 6),
            *answers("mtp2", [0.02] * 6, category="creative"),
        )
    )
    # Six prompts at 2 and six at 0.5 times plain's speed: the median of all is 1.25.
    assert answer(analysis) == (
        "On this machine (cpu), no variant is shown to be faster than plain: the fastest at "
        "1 stream, mtp2, decodes 1.25× [0.50, 2.00] as fast; but by category, "
        "mtp2 2.00× [2.00, 2.00] in code; read the flags first (acceptance-unknown)."
    )


def test_the_answer_names_rivals_and_a_category_without_a_gain() -> None:
    chat = {"category": "chat"}
    spread = [0.004, 0.005, 0.006, 0.004, 0.005, 0.006]
    analysis = analyse(
        run(
            *PLAIN,
            *answers("plain", [0.01], **chat),
            *answers("mtp1", spread),
            *answers("mtp1", [0.01], **chat),
            *answers("mtp2", [each * 1.01 for each in spread]),
            *answers("mtp2", [0.01], **chat),
        )
    )
    sentence = answer(replace(analysis, flags=()))
    # Rates 250, 250, 200, 200, 167, 167 and chat's 100: the median is 200.
    assert sentence.startswith("On this machine (cpu), mtp1 decodes 2.00× [")
    assert sentence.endswith(
        "] as fast as plain at 1 stream, no different from mtp2; no gain is shown in chat."
    )


def test_the_answer_says_where_a_gain_begins() -> None:
    mtp = by_streams("mtp2", {1: 0.01, 2: 0.01, 4: 0.005, 8: 0.004})
    assert answer(replace(analyse(run(*PLAIN_BY_STREAMS, *mtp)), flags=())) == (
        "On this machine (cpu), mtp2 decodes 2.00× [2.00, 2.00] as fast as plain at 4 streams; "
        "no variant is shown to gain at 2 streams or fewer; "
        "the gain lasts to 8 streams, the most tried."
    )


@pytest.mark.parametrize(
    ("tpots", "sentence"),
    [
        (
            [0.02] * 6,
            "On this machine (cpu), no variant is faster than plain: the fastest at 1 stream, "
            "mtp2, decodes 0.50× [0.50, 0.50] as fast.",
        ),
        (
            [0.01] * 6,
            "On this machine (cpu), no variant is shown to be faster than plain: the fastest at "
            "1 stream, mtp2, decodes 1.00× [1.00, 1.00] as fast.",
        ),
        (
            [0.005],
            "On this machine (cpu), no variant is shown to be faster than plain: the fastest at "
            "1 stream, mtp2, decodes 2.00× (no interval: one prompt) as fast.",
        ),
    ],
    ids=["slower", "the same", "one prompt"],
)
def test_the_answer_says_that_no_variant_is_faster(tpots: list[float], sentence: str) -> None:
    analysis = analyse(run(*PLAIN, *answers("mtp2", tpots)))
    assert answer(replace(analysis, flags=())) == sentence


def test_an_answer_from_elsewhere_says_where() -> None:
    # The longest outputs were tried at 1 stream only, the crossover at shorter ones.
    long = [
        *answers("plain", [0.01] * 6, max_tokens=512),
        *answers("mtp2", [0.004] * 6, max_tokens=512),
    ]
    mtp = by_streams("mtp2", {1: 0.005, 2: 0.006, 4: 0.01, 8: 0.02})
    sentence = answer(replace(analyse(run(*PLAIN_BY_STREAMS, *mtp, *long)), flags=()))
    assert sentence == (
        "On this machine (cpu), mtp2 decodes 2.50× [2.50, 2.50] as fast as plain at 1 stream; "
        "the gain is gone from 4 streams (with outputs of 101 tokens)."
    )


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            run(*PLAIN, plain=None),
            "No speed-up can be told: the run has no plain arm to compare with; "
            "read the flags first (no-plain).",
        ),
        (
            run(*PLAIN),
            "No speed-up can be told: under the same load no prompt was answered whole by both "
            "plain and a variant.",
        ),
        (
            run(),
            "No speed-up can be told: under the same load no prompt was answered whole by both "
            "plain and a variant.",
        ),
    ],
    ids=["no plain arm", "plain only", "nothing yet"],
)
def test_a_run_that_compares_nothing_says_so(found: Run, sentence: str) -> None:
    assert headline(analyse(found)) is None
    assert answer(analyse(found)) == sentence


def test_a_folder_is_read_and_analysed(tmp_path: Path) -> None:
    written = run(*PLAIN, *answers("mtp2", [0.005] * 6, drafting=DRAFTING))
    write_study(tmp_path, written.study)
    for each in written.requests:
        append_request(tmp_path, each)
    assert analyse(Run.read(tmp_path)) == analyse(written)
