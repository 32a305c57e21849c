"""Reasons to doubt a run's figures.

Owns what is doubted, from which number on, and the words for it.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from serving.studies.analysis.acceptances import is_possible
from serving.studies.analysis.findings import Acceptance, Flag, Speedup
from serving.studies.records import RequestRecord, Run, StudyRecord

MIN_DRAFTED = 50
"""Draft tokens from which an acceptance of 0 is no accident."""
FLAT_RATE = 0.9
"""Acceptance at the last place, for n > 1, from which a text is suspected to loop."""
MIN_TOKENS = 500
"""Output tokens of an arm in a category from which its figures mean something."""
MIN_PROMPTS = 5
"""Prompts from which a bootstrap interval can be relied on."""
MAX_DRIFT = 0.05
MIN_DISTINCT = 0.5
"""Share of different 4-grams under which a text is mostly repeated."""


def flags_of(
    run: Run,
    answered: Sequence[RequestRecord],
    acceptances: Sequence[Acceptance],
    speedups: Sequence[Speedup],
) -> Iterator[Flag]:
    """Everything to doubt, the gravest first."""
    yield from _error_flags(run)
    yield from _acceptance_flags(run.study, answered, acceptances)
    yield from _text_flags(answered)
    yield from _drift_flags(run.study, answered)
    yield from _volume_flags(answered, speedups)


def _error_flags(run: Run) -> Iterator[Flag]:
    sent = Counter(each.arm for each in run.requests)
    failed: dict[str, Counter[str]] = defaultdict(Counter)
    for each in run.requests:
        if not each.ok:
            failed[each.arm][each.outcome] += 1
    for arm, outcomes in failed.items():
        kinds = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        numbers = {"requests": sent[arm], "errors": outcomes.total(), **outcomes}
        text = f"{outcomes.total()} of {sent[arm]} requests to {arm} failed: {kinds}"
        yield Flag("errors", text, arm, numbers=numbers)
    disturbing = [each.text for each in run.study.events if each.disturbs]
    if disturbing:
        text = "the run was disturbed: " + "; ".join(disturbing)
        yield Flag("events", text, numbers={"events": len(disturbing)})
    if run.study.plain is None:
        yield Flag("no-plain", "the run has no plain arm, so no speed-up can be told")


def _acceptance_flags(
    study: StudyRecord, answered: Sequence[RequestRecord], acceptances: Sequence[Acceptance]
) -> Iterator[Flag]:
    for each in acceptances:
        if each.category is None and each.drafted >= MIN_DRAFTED and not each.accepted:
            text = (
                f"{each.arm} accepted none of {each.drafted} draft tokens: its draft head is not "
                "loaded, or its weights are missing from the checkpoint"
            )
            yield Flag("acceptance-zero", text, each.arm, None, {"drafted": each.drafted})
        rates = [rate.value for rate in each.per_position]
        if each.category and len(rates) > 1 and rates[-1] >= FLAT_RATE:
            text = (
                f"{each.arm} accepts almost everything at every place in {each.category} "
                f"({', '.join(f'{rate:.2f}' for rate in rates)}): its text probably loops, and "
                "the speed-up is too good"
            )
            numbers = {f"place_{place}": rate for place, rate in enumerate(rates, 1)}
            yield Flag("acceptance-flat", text, each.arm, each.category, numbers)
    told = {each.arm for each in acceptances}
    busy = {each.arm for each in answered}
    for arm in study.arms:
        if arm.draft_tokens and arm.name in busy and arm.name not in told:
            text = f"{arm.name} reports no draft tokens of its own: its acceptance is not known"
            yield Flag("acceptance-unknown", text, arm.name)
    impossible = Counter(
        each.arm for each in answered if each.drafting and not is_possible(each.drafting)
    )
    for name, count in impossible.items():
        text = f"{count} answers of {name} report draft counts that cannot be; they are left out"
        yield Flag("acceptance-impossible", text, name, numbers={"answers": count})


def _text_flags(answered: Iterable[RequestRecord]) -> Iterator[Flag]:
    shares: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each in answered:
        if each.distinct_4grams is not None:
            shares[each.arm, each.category].append(each.distinct_4grams)
    for (arm, category), values in shares.items():
        median = statistics.median(values)
        if median < MIN_DISTINCT:
            text = (
                f"the text of {arm} in {category} mostly repeats itself (median share of "
                f"different 4-grams {median:.2f}), which flatters acceptance"
            )
            yield Flag("text-repeated", text, arm, category, {"distinct_4grams": median})


def _drift_flags(study: StudyRecord, answered: Iterable[RequestRecord]) -> Iterator[Flag]:
    """Plain's first answer to each prompt and load, beside its last."""
    times: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for each in answered:
        if each.arm == study.plain and each.tpot_s:
            key = (each.category, each.prompt, each.streams, each.max_tokens, each.temperature)
            times[key].append((each.sent_at, each.tpot_s))
    repeated = [sorted(found) for found in times.values() if len(found) > 1]
    if not repeated:
        return
    first = statistics.median(found[0][1] for found in repeated)
    last = statistics.median(found[-1][1] for found in repeated)
    change = last / first - 1
    if abs(change) > MAX_DRIFT:
        text = (
            f"plain took {abs(change):.0%} {'more' if change > 0 else 'less'} time per token at "
            f"the end of the run than at its start: the machine was not steady"
        )
        numbers = {"change": change, "first_tpot_s": first, "last_tpot_s": last}
        yield Flag("drift", text, study.plain, numbers=numbers)


def _volume_flags(answered: Iterable[RequestRecord], speedups: Iterable[Speedup]) -> Iterator[Flag]:
    tokens: Counter[tuple[str, str]] = Counter()
    for each in answered:
        tokens[each.arm, each.category] += each.completion_tokens or 0
    for (arm, category), count in tokens.items():
        if count < MIN_TOKENS:
            text = f"only {count} tokens of {arm} in {category}: too few to rely on"
            yield Flag("few-tokens", text, arm, category, {"tokens": count})
    prompts: dict[str, int] = {}
    for pair in speedups:
        if pair.setting.category:
            category = pair.setting.category
            prompts[category] = min(pair.prompts, prompts.get(category, pair.prompts))
    for category, count in prompts.items():
        if count < MIN_PROMPTS:
            text = f"only {count} prompts compared in {category}: its intervals are unreliable"
            yield Flag("few-prompts", text, None, category, {"prompts": count})
