"""What each arm did under each load: throughput, latency and errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from serving.studies import statistics
from serving.studies.analysis.findings import Load, Setting
from serving.studies.records import RequestRecord, StudyRecord


def loads_of(study: StudyRecord, requests: Iterable[RequestRecord]) -> tuple[Load, ...]:
    """Every arm under every load it was given, plain first under each."""
    place = {name: number for number, name in enumerate(study.arm_names)}
    groups: dict[tuple[str, Setting], list[RequestRecord]] = {}
    for each in requests:
        setting = Setting(None, each.streams, each.max_tokens, each.temperature)
        groups.setdefault((each.arm, setting), []).append(each)
    return tuple(
        _load(arm, setting, groups[arm, setting])
        for arm, setting in sorted(groups, key=lambda key: (key[1].order, place[key[0]]))
    )


def _load(arm: str, setting: Setting, requests: Sequence[RequestRecord]) -> Load:
    answered = [each for each in requests if each.ok]
    ttft = [each.ttft_s for each in answered if each.ttft_s is not None]
    tpot = [each.tpot_s for each in answered if each.tpot_s is not None]
    busy = busy_seconds(requests)
    tokens = sum(each.completion_tokens or 0 for each in answered)
    ttft_median, ttft_p95 = statistics.median_and_p95(ttft) if ttft else (None, None)
    tpot_median, tpot_p95 = statistics.median_and_p95(tpot) if tpot else (None, None)
    return Load(
        arm=arm,
        setting=setting,
        requests=len(requests),
        errors=len(requests) - len(answered),
        tokens_per_s=tokens / busy if busy else None,
        ttft_median_s=ttft_median,
        ttft_p95_s=ttft_p95,
        tpot_median_s=tpot_median,
        tpot_p95_s=tpot_p95,
    )


def busy_seconds(requests: Iterable[RequestRecord]) -> float:
    """Seconds in which at least one of the requests ran: pauses between blocks do not count."""
    spans = sorted((each.sent_at, each.sent_at + (each.duration_s or 0)) for each in requests)
    busy = 0.0
    until = -math.inf
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy
