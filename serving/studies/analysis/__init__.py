"""What a run's records say: speed-ups, acceptance, where the gain stops, and what to doubt.

Owns putting all findings of a run together. Leaves formulas to `serving.studies.statistics`,
the sameness of texts to `serving.studies.lossless` and showing all this to the report.

A failed request is in no comparison, median or rate; it is counted among the errors. Plain's
last pass, asked again at the end, is for drift and for plain's own sameness: in the other
figures it would give plain one round more than the arms have.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from serving.studies.analysis.acceptances import acceptances_of
from serving.studies.analysis.conclusions import best_of, break_evens_of, crossovers_of
from serving.studies.analysis.findings import Analysis
from serving.studies.analysis.flags import flags_of
from serving.studies.analysis.loads import loads_of
from serving.studies.analysis.speedups import speedups_of
from serving.studies.records import RequestRecord, Run


def analyse(run: Run) -> Analysis:
    """Everything that `run` says; copes with a run that has only begun."""
    answered = [each for each in run.requests if each.ok]
    compared = [each for each in answered if not each.again]
    speedups = speedups_of(run.study, compared)
    acceptances = acceptances_of(compared)
    tokens = _tokens_by_arm(answered)
    return Analysis(
        study=run.study,
        variants=_variants(run),
        speedups=speedups,
        loads=loads_of(run.study, (each for each in run.requests if not each.again)),
        acceptances=acceptances,
        best=best_of(speedups),
        crossovers=crossovers_of(speedups),
        break_evens=break_evens_of(speedups),
        joules_per_token={
            arm: joules / tokens[arm]
            for arm, joules in (run.study.energy_j or {}).items()
            if tokens[arm]
        },
        flags=tuple(flags_of(run, answered, acceptances, speedups)),
        measured_tokens=tokens.total(),
        context_tokens=max(
            ((each.prompt_tokens or 0) + (each.completion_tokens or 0) for each in answered),
            default=0,
        ),
    )


def _variants(run: Run) -> dict[str, str]:
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    for each in run.requests:
        if each.variant:
            seen[each.arm][each.variant] += 1
    return {
        arm.name: seen[arm.name].most_common(1)[0][0] if seen[arm.name] else arm.name
        for arm in run.study.arms
    }


def _tokens_by_arm(answered: Iterable[RequestRecord]) -> Counter[str]:
    tokens: Counter[str] = Counter()
    for each in answered:
        tokens[each.arm] += each.completion_tokens or 0
    return tokens
