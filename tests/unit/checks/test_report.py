"""How findings read on a terminal."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from serving.checks.report import as_table, links
from serving.checks.run import check
from tests.unit.checks.builders import TRUNK, checkpoint


def shown(target: str, **options: str) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(as_table(check(target, **options)))  # type: ignore[arg-type]
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def test_a_finding_says_what_where_its_effect_its_cure_and_its_source(tmp_path: Path) -> None:
    text = shown(checkpoint(tmp_path, tensors=TRUNK), vllm_version="0.32.0")
    for part in (
        "error", "MTP010", "the MTP head was dropped", "mtp_num_hidden_layers is 1",
        "accepts nothing", "Choose an export that kept the head", "vLLM >=0.17",
        "open (October 2026)", "vllm-project/vllm#35548",
    ):  # fmt: skip
        assert part in text


def test_the_sum_counts_each_severity() -> None:
    assert shown("2x-rtx3090-35b-int4", vllm_version="0.32.0").endswith("4 warnings")
    assert shown("demo", vllm_version="0.32.0").endswith("nothing found")


def test_what_is_settled_stands_below_the_table() -> None:
    text = shown("rtx3090-27b-int4", vllm_version="0.32.0")
    assert "MTP309 structured output with MTP, before the fix: fixed in 0.26 (vllm-project" in text


def test_threads_become_addresses() -> None:
    assert links("vllm-project/vllm#1; syv-ai/HyperQwen, gotcha 3; a.b/c-d#22") == [
        "https://github.com/vllm-project/vllm/issues/1",
        "https://github.com/a.b/c-d/issues/22",
    ]


def test_a_finding_alone_reads_as_one_paragraph(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "model", tensors=TRUNK)
    text = str(check(target).findings[0])
    assert text.startswith(
        f"MTP010 {target}: the MTP head was dropped: mtp_num_hidden_layers is 1,"
    )
    assert text.endswith("and set mtp_num_hidden_layers to 0.")
