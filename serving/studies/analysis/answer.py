"""The run in one sentence.

Owns which of the findings it is about and how it is worded. What was not measured is not
said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from serving.studies.analysis.findings import Analysis, Best, Setting
from serving.studies.statistics import Estimate


def headline(analysis: Analysis) -> Best | None:
    """The best variant over all categories that the answer is about.

    Of the settings where a variant is faster than plain, else of all: the lowest
    temperature, there the fewest streams, there the longest outputs. None where nothing was
    compared, or only under open-loop load.
    """
    return min(
        (each for each in analysis.best if not each.setting.category and each.setting.streams),
        key=lambda each: (
            each.verdict != "faster",
            each.setting.temperature,
            each.setting.streams,
            -each.setting.max_tokens,
        ),
        default=None,
    )


def answer(analysis: Analysis) -> str:
    """The run in one sentence; what was not measured is not said."""
    best = headline(analysis)
    if best is not None:
        parts = [_speed(analysis, best), *_by_category(analysis, best)]
        if best.verdict == "faster":
            parts += [*_where_it_ends(analysis, best), *_short_outputs(analysis, best)]
    elif analysis.study.plain is None:
        parts = ["No speed-up can be told: the run has no plain arm to compare with"]
    else:
        parts = [
            "No speed-up can be told: under the same load no prompt was answered whole by both "
            "plain and a variant"
        ]
    if analysis.flags:
        names = ", ".join(dict.fromkeys(each.name for each in analysis.flags))
        parts.append(f"read the flags first ({names})")
    return "; ".join(parts) + "."


def _speed(analysis: Analysis, best: Best) -> str:
    machine = f"On this machine ({analysis.study.gpu})"
    at = f"at {streams_in_words(best.setting.streams)}"
    if len({each.setting.temperature for each in analysis.best}) > 1:
        at += f" and temperature {best.setting.temperature:g}"
    arm, value = _label(analysis, best.arm), times_in_words(best.speedup)
    if best.verdict == "faster":
        rivals = " and ".join(_label(analysis, name) for name in best.no_difference_from)
        same = f", no different from {rivals}" if rivals else ""
        return f"{machine}, {arm} decodes {value} as fast as plain {at}{same}"
    shown = "is" if best.verdict == "slower" else "is shown to be"
    return (
        f"{machine}, no variant {shown} faster than plain: "
        f"the fastest {at}, {arm}, decodes {value} as fast"
    )


def _by_category(analysis: Analysis, best: Best) -> Iterator[str]:
    """The categories that the average hides."""
    others = [
        each
        for each in analysis.best
        if each.setting.category
        and replace(each.setting, category=None) == best.setting
        and (each.verdict == "faster") != (best.verdict == "faster")
    ]
    if best.verdict == "faster" and others:
        yield f"no gain is shown in {' and '.join(str(each.setting.category) for each in others)}"
    elif others:
        gains = (
            f"{_label(analysis, each.arm)} {times_in_words(each.speedup)} "
            f"in {each.setting.category}"
            for each in others
        )
        yield f"but by category, {' and '.join(gains)}"


def _where_it_ends(analysis: Analysis, best: Best) -> Iterator[str]:
    below = [
        each.setting.streams
        for each in analysis.best
        if not each.setting.category
        and each.setting.temperature == best.setting.temperature
        and 0 < each.setting.streams < best.setting.streams
    ]
    if below:
        yield f"no variant is shown to gain at {streams_in_words(max(below))} or fewer"
    for each in analysis.crossovers:
        if each.arm != best.arm or each.category or len(each.tried) < 2:
            continue
        held = replace(best.setting, max_tokens=each.max_tokens, temperature=each.temperature)
        elsewhere = _elsewhere(held, best.setting)
        if each.gain_gone_from is None:
            yield f"the gain lasts to {streams_in_words(each.tried[-1])}, the most tried{elsewhere}"
        else:
            yield f"the gain is gone from {streams_in_words(each.gain_gone_from)}{elsewhere}"


def _short_outputs(analysis: Analysis, best: Best) -> Iterator[str]:
    for each in analysis.break_evens:
        if each.arm != best.arm or each.category or len(each.tried) < 2:
            continue
        held = replace(best.setting, streams=each.streams, temperature=each.temperature)
        elsewhere = _elsewhere(held, best.setting)
        if each.faster_from is None:
            yield (
                f"with the prompt's time it gains nothing at {each.tried[-1]} tokens of output"
                f"{elsewhere}"
            )
        elif each.plain_faster_to is not None:
            yield f"use plain for outputs under {each.faster_from} tokens{elsewhere}"
        elif each.faster_from > each.tried[0]:
            yield f"no gain is shown for outputs under {each.faster_from} tokens{elsewhere}"


def _elsewhere(held: Setting, said: Setting) -> str:
    """Where `held` was measured, as far as it is not where the sentence already is."""
    parts = []
    if held.streams != said.streams:
        parts.append(streams_in_words(held.streams))
    if held.max_tokens != said.max_tokens:
        parts.append(f"outputs of {held.max_tokens} tokens")
    if held.temperature != said.temperature:
        parts.append(f"temperature {held.temperature:g}")
    return f" (with {', '.join(parts)})" if parts else ""


def streams_in_words(count: int) -> str:
    """`1 stream`, `8 streams`, or open-loop load for 0."""
    return {0: "open-loop load", 1: "1 stream"}.get(count, f"{count} streams")


def times_in_words(estimate: Estimate) -> str:
    """A speed-up as `1.80× [1.70, 1.90]`."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.2f}× (no interval: one prompt)"
    return f"{estimate.value:.2f}× [{estimate.low:.2f}, {estimate.high:.2f}]"


def _label(analysis: Analysis, name: str) -> str:
    """An arm's name, with its n where the name does not tell it."""
    n = next((arm.draft_tokens for arm in analysis.study.arms if arm.name == name), None)
    return name if n is None or str(n) in name else f"{name} (n={n})"
