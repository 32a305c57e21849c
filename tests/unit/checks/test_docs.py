"""docs/checks.md lists the rules as the command does."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from serving.checks.report import rules_table
from serving.checks.rules import RULES

DOCS = Path(__file__).parents[3] / "docs" / "checks.md"


def rows(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.startswith("| MTP")]


def test_the_table_of_rules_is_what_the_command_prints() -> None:
    # As wide as `COLUMNS=400 moe-serving check --list-rules` makes it, so that no cell is broken.
    console = Console(file=io.StringIO(), width=400)
    console.print(rules_table(RULES))
    printed = rows(console.file.getvalue())  # type: ignore[attr-defined]
    assert len(printed) == len(RULES)
    assert rows(DOCS.read_text(encoding="utf-8")) == printed
