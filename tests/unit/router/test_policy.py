"""A policy file is read whole, or refused with line, field and cure."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from serving.catalog import ConfigError
from serving.catalog.yaml_file import load_yaml, parse_yaml
from serving.router.policy import BestVariant, Limits, Measured, Policy

TEXT = """\
schema: 1
model: tiny-moe
measured:
  study: n-sweep-20261130
  gpu: cpu
  date: 2026-11-30
  versions: {vllm: 0.32.0}
best:
  variant: mtp2
  speedup: 1.8
  interval: [1.7, 1.9]
crossover_streams: 6
break_even_output_tokens: null
by_category: {code: mtp2, creative: plain}
limits: {context_tokens: 640, measured_tokens: 98304}
"""

POLICY = Policy(
    schema=1,
    model="tiny-moe",
    measured=Measured(
        study="n-sweep-20261130",
        gpu="cpu",
        date=datetime.date(2026, 11, 30),
        versions={"vllm": "0.32.0"},
    ),
    best=BestVariant(variant="mtp2", speedup=1.8, interval=(1.7, 1.9)),
    crossover_streams=6,
    break_even_output_tokens=None,
    by_category={"code": "mtp2", "creative": "plain"},
    limits=Limits(context_tokens=640, measured_tokens=98304),
)


def test_a_policy_file_is_read_into_its_types(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(TEXT, encoding="utf-8")
    assert load_yaml(file, Policy) == POLICY


@pytest.mark.parametrize(
    ("line", "instead", "complaint"),
    [
        ("schema: 1", "schema: 2", "policy.yaml:1: schema: found 2; should be 1"),
        (
            "crossover_streams: 6",
            "crossover_streams: 0",
            "policy.yaml:12: crossover_streams: found 0; should be greater than or equal to 1",
        ),
        (
            "crossover_streams: 6",
            "crossover_stream: 6",
            "policy.yaml:12: crossover_stream: did you mean crossover_streams?",
        ),
        (
            "  interval: [1.7, 1.9]",
            "  interval: [1.9, 1.7]",
            "policy.yaml:11: best.interval: found [1.9, 1.7]; write [low, high], both above 0",
        ),
        (
            "break_even_output_tokens: null\n",
            "",
            "policy.yaml:1: break_even_output_tokens: missing; "
            "add `break_even_output_tokens: ...` "
            "(for shorter answers plain is faster; null: never seen)",
        ),
        (
            "  speedup: 1.8",
            "  speedup: fast",
            "policy.yaml:10: best.speedup: found 'fast'; should be a valid number",
        ),
    ],
)
def test_a_fault_is_told_with_line_field_and_cure(line: str, instead: str, complaint: str) -> None:
    assert line in TEXT
    with pytest.raises(ConfigError) as refusal:
        parse_yaml(TEXT.replace(line, instead), Policy, name="policy.yaml")
    assert str(refusal.value) == complaint
