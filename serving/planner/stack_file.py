"""A recommendation as a stack file that `moe-serving up` takes.

Owns the file's text and checking it against the stack's own rules before it is written.
Leaves the choice of settings to `recommend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from serving.catalog.errors import ConfigError
from serving.catalog.yaml_file import parse_yaml
from serving.planner.errors import PlannerError
from serving.planner.plan import CPU
from serving.planner.recommend import Recommendation, Setting
from serving.planner.words import advice
from serving.stack.spec import StackSpec

INDENT = "    "
COMMENT_COLUMN = 40
MODEL_KEYS = ("mtp", "plain")


def stack_text(found: Recommendation) -> str:
    """The stack file; raises PlannerError where the plan fits nothing or the stack refuses it."""
    if found.fits is False:
        raise PlannerError(f"no stack file: {next(iter(advice(found)))}")
    request = found.plan.request
    lines = [
        f"# {request.model.name} on {request.gpu.name}, planned by `moe-serving plan`.",
        *(f"# {sentence}" for sentence in advice(found)),
        *(f"# Caution: {caution}." for caution in found.cautions),
        "schema: 1",
        "",
        "models:",
        f"  - model: {request.model.id}",
        f"    checkpoint: {request.checkpoint}",
        f"    gpu: {request.gpu.id}",
        *_lines(found.settings, INDENT),
        *([f"{INDENT}default_variant: mtp"] if found.both_variants else []),
        f"{INDENT}variants:",
        *_variants(found),
    ]
    text = "\n".join(lines) + "\n"
    try:
        parse_yaml(text, StackSpec, name="stack", path=Path("planned.yaml"))
    except ConfigError as error:
        raise PlannerError(f"the stack file planned for is refused: {error}") from error
    return text


def write_stack(found: Recommendation, file: Path) -> None:
    """Write the stack file; raises PlannerError where it cannot be planned or written."""
    text = stack_text(found)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlannerError(f"{file}: {error.strerror}; name another file with -o") from error


def _variants(found: Recommendation) -> list[str]:
    lines = []
    if found.draft_tokens:
        lines += [
            f"{INDENT}  mtp:",
            *_lines(found.drafting_settings, INDENT * 2),
            f"{INDENT * 2}speculative:",
            *_lines(found.speculative, INDENT * 2 + "  "),
        ]
    if not found.draft_tokens or found.both_variants:
        caching = found.plan.request.gpu.id != CPU
        setting = Setting("prefix_caching", True, "safe without drafting")
        lines += [f"{INDENT}  plain:", *(_lines([setting], INDENT * 2) if caching else [])]
        if not caching:
            lines[-1] += " {}"
    return lines


def _lines(settings: Sequence[Setting], indent: str) -> list[str]:
    """Each setting as `key: value  # why`."""
    lines = []
    for each in settings:
        line = f"{indent}{each.key}: {_value(each.value)}"
        lines.append(f"{line:<{COMMENT_COLUMN}} # {each.why}")
    return lines


def _value(value: Any) -> str:
    """A value in one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, width=1_000)
    return str(text).removesuffix("...\n").strip()
