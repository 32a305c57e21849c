"""The report of one run as a page.

Owns the order of its parts and the words around them. Leaves figures to `analysis`, charts
to `charts` and tables to `tables`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import yaml

from serving.studies.analysis import analyse
from serving.studies.analysis.answer import answer
from serving.studies.analysis.findings import Analysis
from serving.studies.lossless import compare_greedy, in_words
from serving.studies.records import Run, StudyRecord
from serving.studies.report import tables
from serving.studies.report.charts import charts
from serving.studies.report.content import Page, Remark
from serving.studies.report.method import method
from serving.studies.report.plots import draw

MAX_OF_A_KIND = 6
"""Flags of one kind that are written out."""


def page_of(run: Run, analysis: Analysis | None = None) -> Page:
    """Everything that a report of `run` says; `analysis` is of the same run, where there is one."""
    found = analysis or analyse(run)
    agreements = compare_greedy(run)
    study = run.study
    # A study that asks for tokens asks whether the text is the same; speed comes second.
    sameness = in_words(agreements, study.plain) if study.spec.get("token_details") else None
    return Page(
        over=f"{study.gpu} · {date_of(study)} · run {study.id}",
        title=study.name,
        question=study.question,
        answer=" ".join(filter(None, (sameness, answer(found)))),
        flags=flags(found),
        facts=facts(run, found),
        drawings=tuple(draw(chart) for chart in charts(found)),
        tables=tables.tables(found, agreements),
        method=method(found, agreements),
        commands=commands(study),
        background=(tables.arms(found), tables.environment(study.environment)),
        files=tuple(files(study)),
    )


def flags(analysis: Analysis) -> tuple[Remark, ...]:
    """A line for each kind of flag, the gravest first, with what it was raised for."""
    kinds: dict[str, list[str]] = {}
    for each in analysis.flags:
        kinds.setdefault(each.name, []).append(each.text)
    lines = []
    for name, texts in kinds.items():
        more = len(texts) - MAX_OF_A_KIND
        rest = [f"and {more} more of this kind"] if more > 0 else []
        lines.append(Remark(name, "; ".join([*texts[:MAX_OF_A_KIND], *rest])))
    return tuple(lines)


def facts(run: Run, analysis: Analysis) -> str:
    """What the figures rest on, in a line."""
    failed = sum(not each.ok for each in run.requests)
    parts = [
        f"{len(run.requests):,} requests, {failed:,} failed",
        f"{analysis.measured_tokens:,} output tokens",
        f"longest context {analysis.context_tokens:,} tokens",
        f"{len(run.study.arms)} arms",
        _took(run.study),
    ]
    return " · ".join(parts)


def date_of(study: StudyRecord) -> str:
    """The day it began, in UTC."""
    return datetime.fromtimestamp(study.started_at, UTC).date().isoformat()


def commands(study: StudyRecord) -> str:
    """What to type; the study file is the one in the report."""
    lines = []
    if study.commit:
        commit = study.commit.removesuffix("-dirty")
        lines.append(f"git checkout {shlex.quote(commit)} && make setup")
        if commit != study.commit:
            lines.append("# files differed from that commit when it ran")
    lines.append("# the study file below, saved as study.yaml")
    lines.append(f"moe-serving study run study.yaml --out {shlex.quote(study.name)}")
    lines.append(f"moe-serving study report {shlex.quote(study.name)}")
    return "\n".join(lines)


def files(study: StudyRecord) -> Iterator[tuple[str, str]]:
    """Study file and stack file, as they were resolved."""
    yield "Study file, as resolved", as_yaml(study.spec)
    if study.stack is not None:
        yield "Stack file, as resolved", as_yaml(study.stack)


def as_yaml(data: Any) -> str:
    """YAML of plain data, in the order it has."""
    return yaml.safe_dump(json.loads(json.dumps(data)), sort_keys=False, allow_unicode=True)


def _took(study: StudyRecord) -> str:
    if study.ended_at is None:
        return "not finished"
    minutes = round((study.ended_at - study.started_at) / 60)
    hours, rest = divmod(minutes, 60)
    return f"took {hours} h {rest} min" if hours else f"took {rest} min"
