"""What each arm drafted and how much of it was accepted.

Owns which counts are summed up: those that are a request's own and can be. Leaves the
formulas to `statistics`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from serving.studies import statistics
from serving.studies.analysis.findings import Acceptance
from serving.studies.records import Drafting, RequestRecord


def acceptances_of(answered: Iterable[RequestRecord]) -> tuple[Acceptance, ...]:
    """Every arm that drafted, by temperature and category and over all categories."""
    groups: dict[tuple[str, float, str | None], list[RequestRecord]] = {}
    for each in answered:
        if _own_counts(each):
            for category in (each.category, None):
                groups.setdefault((each.arm, each.temperature, category), []).append(each)
    return tuple(
        _acceptance(*key, groups[key])
        for key in sorted(groups, key=lambda key: (key[0], key[1], key[2] or ""))
    )


def _own_counts(record: RequestRecord) -> bool:
    """Whether the counts are the request's own and possible.

    A server's counters, read around one of several requests, hold the others' tokens too.
    """
    found = record.drafting
    if found is None or not found.drafted or not is_possible(found):
        return False
    return found.source == "request" or record.streams == 1


def is_possible(found: Drafting) -> bool:
    """Whether nothing was accepted that was not drafted, and no place more often than the last."""
    reached = (found.drafts, *(found.accepted_per_position or ()))
    falling = all(one >= other >= 0 for one, other in itertools.pairwise(reached))
    return falling and found.accepted <= found.drafted


def _acceptance(
    arm: str, temperature: float, category: str | None, records: Sequence[RequestRecord]
) -> Acceptance:
    found = [each.drafting for each in records if each.drafting]
    drafts = sum(each.drafts for each in found)
    drafted = sum(each.drafted for each in found)
    accepted = sum(each.accepted for each in found)
    places, placed_drafts = _accepted_by_place(found)
    return Acceptance(
        arm=arm,
        category=category,
        temperature=temperature,
        drafts=drafts,
        drafted=drafted,
        accepted=accepted,
        rate=statistics.acceptance_rate(accepted, drafted),
        mean_length=statistics.mean_acceptance_length(accepted, drafts) if drafts else None,
        per_position=statistics.per_position_rates(places, placed_drafts),
        conditional=statistics.conditional_rates(places, placed_drafts),
        expected_tokens_per_step=(
            statistics.expected_tokens_per_step(len(places), places[0] / placed_drafts)
            if places
            else None
        ),
        tokens_per_chunk=_tokens_per_chunk(records),
    )


def _accepted_by_place(found: Iterable[Drafting]) -> tuple[list[int], int]:
    """Accepted tokens by place, and the drafts that they are out of."""
    places: list[int] = []
    drafts = 0
    for each in found:
        counts = each.accepted_per_position
        if not counts:
            continue
        drafts += each.drafts
        places += [0] * (len(counts) - len(places))
        for place, count in enumerate(counts):
            places[place] += count
    return (places, drafts) if drafts else ([], 0)


def _tokens_per_chunk(records: Iterable[RequestRecord]) -> float | None:
    tokens = chunks = 0
    for each in records:
        if each.streams == 1 and each.completion_tokens and each.chunks and each.chunks > 1:
            tokens += each.completion_tokens - 1
            chunks += each.chunks - 1
    return tokens / chunks if chunks else None
