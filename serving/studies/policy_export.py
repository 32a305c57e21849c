"""From what a study found to the policy file that the router reads.

Owns which finding becomes which key. Leaves the file's schema to `serving.router.policy`
and what was found to `analysis`.
"""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

import yaml

from serving.router.policy import BestVariant, Limits, Measured, Policy
from serving.studies.analysis import analyse
from serving.studies.analysis.answer import headline
from serving.studies.analysis.findings import Analysis, Best
from serving.studies.records import Run


class PolicyExportError(ValueError):
    """The run cannot be made a policy, or not written; the text tells what is lacking."""


def export_policy(folder: Path, output: Path) -> Path:
    """Write the policy of the run in `folder` to `output`, and return that.

    Raises RecordsError where the run cannot be read, PolicyExportError else.
    """
    policy = to_policy(analyse(Run.read(folder)))
    try:
        write_policy(policy, output)
    except OSError as error:
        raise PolicyExportError(
            f"{output}: cannot be written ({error.strerror}); name another file"
        ) from error
    return output


def to_policy(analysis: Analysis) -> Policy:
    """What the router is to do by this run; raises PolicyExportError.

    The variant is the headline's, and plain where none is shown to be faster. Crossover and
    break-even are that variant's, over all categories. A category has the same variant
    unless another is faster there beyond chance.
    """
    study = analysis.study
    best = headline(analysis)
    if study.plain is None or best is None:
        raise PolicyExportError(
            f"{study.id}: nothing compares a variant with plain; run a study with a plain arm, "
            "at one stream at least, and export that"
        )
    plain = next((arm for arm in study.arms if arm.name == study.plain), None)
    if plain is None:
        raise PolicyExportError(f"{study.id}: its plain arm {study.plain!r} is not among its arms")
    ended = datetime.datetime.fromtimestamp(study.ended_at or study.started_at, datetime.UTC)
    return Policy(
        schema=1,
        model=plain.model.partition("@")[0],
        measured=Measured(
            study=study.id, gpu=study.gpu, date=ended.date(), versions=study.environment
        ),
        best=_best_variant(analysis, best),
        crossover_streams=_crossover_streams(analysis, best),
        break_even_output_tokens=_break_even_tokens(analysis, best),
        by_category={
            each.setting.category: analysis.variants[_choice(analysis, each, best.arm)]
            for each in analysis.best
            if each.setting.category and replace(each.setting, category=None) == best.setting
        },
        limits=Limits(
            context_tokens=analysis.context_tokens, measured_tokens=analysis.measured_tokens
        ),
    )


def write_policy(policy: Policy, file: Path) -> None:
    """Write `policy` as YAML that `load_yaml` reads back; raises OSError."""
    study = " ".join(policy.measured.study.split())
    data = policy.model_dump(mode="json", by_alias=True)
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    file.write_text(f"# Measured by the study {study}.\n{text}", encoding="utf-8")


def _choice(analysis: Analysis, found: Best, preferred: str) -> str:
    """The arm to use in a setting; of equally good ones, `preferred`."""
    if found.verdict != "faster":
        return analysis.study.plain or preferred
    return preferred if preferred in found.no_difference_from else found.arm


def _best_variant(analysis: Analysis, best: Best) -> BestVariant:
    variant = analysis.variants[_choice(analysis, best, best.arm)]
    low, high = best.speedup.low, best.speedup.high
    if best.verdict != "faster" or low is None or high is None:
        return BestVariant(variant=variant, speedup=1.0, interval=None)
    return BestVariant(
        variant=variant,
        speedup=round(best.speedup.value, 3),
        interval=(round(low, 3), round(high, 3)),
    )


def _crossover_streams(analysis: Analysis, best: Best) -> int | None:
    for each in analysis.crossovers:
        if (each.arm, each.category) == (best.arm, None):
            return each.plain_faster_from
    return None


def _break_even_tokens(analysis: Analysis, best: Best) -> int | None:
    """The shortest length that pays, if plain was seen to be faster for shorter ones."""
    for each in analysis.break_evens:
        if (each.arm, each.category) == (best.arm, None) and each.plain_faster_to is not None:
            return each.faster_from
    return None
