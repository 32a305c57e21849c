"""What a study found, as the policy file that the router reads."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serving.catalog.yaml_file import load_yaml
from serving.router.policy import BestVariant, Limits, Measured, Policy
from serving.studies.analysis import analyse
from serving.studies.analysis.findings import Analysis, Best, BreakEven, Crossover, Setting
from serving.studies.policy_export import (
    PolicyExportError,
    export_policy,
    to_policy,
    write_policy,
)
from serving.studies.records import (
    Arm,
    RequestRecord,
    Run,
    StudyRecord,
    append_request,
    write_study,
)
from serving.studies.statistics import Estimate

FASTER, SAME, SLOWER = (
    Estimate(1.8004, 1.7004, 1.9004),
    Estimate(1.1, 0.9, 1.3),
    Estimate(0.8, 0.7, 0.9),
)
# 2026-11-30 23:30 UTC
ENDED = datetime.datetime(2026, 11, 30, 23, 30, tzinfo=datetime.UTC).timestamp()


def study(**fields: Any) -> StudyRecord:
    given: dict[str, Any] = {
        "id": "n-sweep-1",
        "name": "n-sweep",
        "question": "Which n is best?",
        "arms": tuple(
            Arm(name=name, url="http://a/v1", model=f"tiny-moe@{variant}")
            for name, variant in (("plain", "plain"), ("n=2", "mtp2"), ("n=3", "mtp3"))
        ),
        "plain": "plain",
        "gpu": "cpu",
        "environment": {"vllm": "0.32.0"},
        "spec": {},
        "started_at": 0.0,
        "ended_at": ENDED,
    }
    return StudyRecord(**given | fields)


def best(
    category: str | None, speedup: Estimate, arm: str = "n=2", rivals: Iterable[str] = ()
) -> Best:
    return Best(Setting(category, 1, 256, 0.0), arm, speedup, tuple(rivals))


def analysis(*found: Best, **fields: Any) -> Analysis:
    empty = analyse(Run(study(), ()))
    given = {
        "best": found,
        "variants": {"plain": "plain", "n=2": "mtp2", "n=3": "mtp3"},
        "measured_tokens": 98304,
        "context_tokens": 640,
    }
    return replace(empty, **given | fields)


def crossover(arm: str, category: str | None, plain_faster_from: int | None) -> Crossover:
    return Crossover(arm, category, 256, 0.0, (1, 4, 8), 4, plain_faster_from)


def break_even(faster_from: int | None, plain_faster_to: int | None) -> BreakEven:
    return BreakEven("n=2", None, 1, 0.0, (8, 16, 32), faster_from, plain_faster_to)


def test_a_policy_holds_what_was_found() -> None:
    found = analysis(
        best(None, FASTER),
        best("chat", SAME),
        best("code", FASTER, arm="n=3"),
        best("rag", FASTER, arm="n=3", rivals=["n=2"]),
        crossovers=(
            crossover("n=3", None, 2),
            crossover("n=2", "code", 4),
            crossover("n=2", None, 8),
        ),
        break_evens=(break_even(32, 16),),
    )
    assert to_policy(found) == Policy(
        schema=1,
        model="tiny-moe",
        measured=Measured(
            study="n-sweep-1",
            gpu="cpu",
            date=datetime.date(2026, 11, 30),
            versions={"vllm": "0.32.0"},
        ),
        best=BestVariant(variant="mtp2", speedup=1.8, interval=(1.7, 1.9)),
        crossover_streams=8,
        break_even_output_tokens=32,
        by_category={"chat": "plain", "code": "mtp3", "rag": "mtp2"},
        limits=Limits(context_tokens=640, measured_tokens=98304),
    )


@pytest.mark.parametrize("speedup", [SAME, SLOWER, Estimate(1.8)])
def test_where_no_variant_is_shown_to_be_faster_plain_is_best(speedup: Estimate) -> None:
    policy = to_policy(analysis(best(None, speedup)))
    assert policy.best == BestVariant(variant="plain", speedup=1.0, interval=None)
    assert (policy.crossover_streams, policy.break_even_output_tokens) == (None, None)


def test_a_break_even_needs_a_length_at_which_plain_was_faster() -> None:
    found = analysis(best(None, FASTER), break_evens=(break_even(16, None),))
    assert to_policy(found).break_even_output_tokens is None


def test_categories_are_taken_under_the_load_of_the_answer() -> None:
    elsewhere = Best(Setting("code", 8, 256, 0.0), "n=3", FASTER, ())
    assert to_policy(analysis(best(None, FASTER), elsewhere)).by_category == {}


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        (
            analysis(),
            "n-sweep-1: nothing compares a variant with plain; run a study with a plain arm, at "
            "one stream at least, and export that",
        ),
        (
            analysis(best(None, FASTER), study=study(plain="off")),
            "n-sweep-1: its plain arm 'off' is not among its arms",
        ),
    ],
    ids=["nothing compared", "plain arm unknown"],
)
def test_a_run_that_makes_no_policy_is_refused(found: Analysis, complaint: str) -> None:
    with pytest.raises(PolicyExportError) as refusal:
        to_policy(found)
    assert str(refusal.value) == complaint


def test_the_file_says_which_study_made_it_and_reads_back(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    found = analysis(best(None, FASTER), best("code", FASTER), study=study(id="n-sweep\n1"))
    policy = to_policy(found)
    write_policy(policy, file)
    assert file.read_text(encoding="utf-8").startswith(
        "# Measured by the study n-sweep 1.\nschema: 1\nmodel: tiny-moe\nmeasured:\n"
    )
    assert load_yaml(file, Policy) == policy


def write_run(folder: Path) -> None:
    """Two prompts at 100 and 50 tokens/s, with n = 2 at 200 and 100."""
    write_study(folder, study())
    for arm, prompt, duration_s in (
        ("plain", "a", 1.5),
        ("plain", "b", 2.5),
        ("n=2", "a", 1.0),
        ("n=2", "b", 1.5),
    ):
        record = RequestRecord(
            cell="c",
            round=0,
            arm=arm,
            draft_tokens=None,
            streams=1,
            category="code",
            prompt=prompt,
            temperature=0,
            max_tokens=101,
            sent_at=0,
            outcome="ok",
            ttft_s=0.5,
            duration_s=duration_s,
            prompt_tokens=20,
            completion_tokens=101,
            variant="plain" if arm == "plain" else "mtp2",
        )
        append_request(folder, record)


def test_a_runs_folder_becomes_a_policy_file(tmp_path: Path) -> None:
    write_run(tmp_path)
    policy = load_yaml(export_policy(tmp_path, tmp_path / "policy.yaml"), Policy)
    assert policy.best == BestVariant(variant="mtp2", speedup=2.0, interval=(2.0, 2.0))
    assert policy.by_category == {"code": "mtp2"}
    assert policy.limits == Limits(context_tokens=121, measured_tokens=404)


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    write_run(tmp_path)
    output = tmp_path / "none" / "policy.yaml"
    with pytest.raises(PolicyExportError) as refusal:
        export_policy(tmp_path, output)
    assert str(refusal.value) == (
        f"{output}: cannot be written (No such file or directory); name another file"
    )
