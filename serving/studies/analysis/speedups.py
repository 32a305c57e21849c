"""Each arm's speed beside plain's.

Owns which answers make a pair and the ratios that are formed of pairs. Speeds are compared
in pairs: the same prompt in the same round under the same load, once by an arm and once by
plain.
"""

from __future__ import annotations

import math
import statistics as stdlib_statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from serving.studies import statistics
from serving.studies.analysis.findings import Setting, Speedup
from serving.studies.records import RequestRecord, StudyRecord

Pair = tuple[str, str, int]
"""Category, prompt and round."""


@dataclass(frozen=True, slots=True)
class _Timing:
    """One arm's answer to one prompt in one round; the median where there were several."""

    seconds: float
    tokens_per_s: float | None


def speedups_of(study: StudyRecord, answered: Iterable[RequestRecord]) -> tuple[Speedup, ...]:
    """Every arm over plain in every setting that both have answers in."""
    groups: dict[Setting, dict[str, dict[Pair, list[RequestRecord]]]] = {}
    for each in answered:
        if each.duration_s:
            for setting in _settings(each):
                by_pair = groups.setdefault(setting, {}).setdefault(each.arm, {})
                by_pair.setdefault((each.category, each.prompt, each.round), []).append(each)
    found = []
    for setting in sorted(groups, key=lambda setting: setting.order):
        timings = {
            arm: {pair: _timing(records) for pair, records in by_pair.items()}
            for arm, by_pair in groups[setting].items()
        }
        plain = timings.pop(study.plain or "", {})
        for arm in (each.name for each in study.arms if each.name in timings):
            shared = sorted(plain.keys() & timings[arm].keys())
            if shared:
                pairs = {pair: (timings[arm][pair], plain[pair]) for pair in shared}
                found.append(_speedup(arm, setting, pairs))
    return tuple(found)


def _settings(record: RequestRecord) -> Iterator[Setting]:
    for category in (record.category, None):
        yield Setting(category, record.streams, record.max_tokens, record.temperature)


def _timing(records: Sequence[RequestRecord]) -> _Timing:
    rates = [1 / each.tpot_s for each in records if each.tpot_s and each.tpot_s > 0]
    return _Timing(
        seconds=stdlib_statistics.median(each.duration_s or 0 for each in records),
        tokens_per_s=stdlib_statistics.median(rates) if rates else None,
    )


def _speedup(arm: str, setting: Setting, pairs: Mapping[Pair, tuple[_Timing, _Timing]]) -> Speedup:
    prompts = [_prompt(pair) for pair in pairs]
    ours = [mine.seconds for mine, _ in pairs.values()]
    plains = [plain.seconds for _, plain in pairs.values()]
    decoded = [
        (mine.tokens_per_s, plain.tokens_per_s, _prompt(pair))
        for pair, (mine, plain) in pairs.items()
        if mine.tokens_per_s is not None and plain.tokens_per_s is not None
    ]
    decode = by_mean = None
    if decoded:
        rates, plain_rates, groups = zip(*decoded, strict=True)
        decode = statistics.ratio_of_medians(rates, plain_rates, groups)
        by_mean = math.fsum(rates) / math.fsum(plain_rates)
    return Speedup(
        arm=arm,
        setting=setting,
        pairs=len(pairs),
        prompts=len(set(prompts)),
        decode=decode,
        end_to_end=statistics.ratio_of_medians(plains, ours, prompts),
        by_mean_tokens_per_s=by_mean,
        by_wall_clock=math.fsum(plains) / math.fsum(ours),
    )


def _prompt(pair: Pair) -> tuple[str, str]:
    """What a resample draws whole: a prompt with all its rounds and repetitions."""
    category, prompt, _ = pair
    return category, prompt.partition("#")[0]
