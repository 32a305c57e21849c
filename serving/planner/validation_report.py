"""A validation as a table for people and as JSON for programs.

Owns what is shown of it. Leaves the figures to `anchors`.
"""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from serving.planner.anchors import Medians, Prediction, Skipped, Validation
from serving.planner.constants import find_family
from serving.planner.tables import figures, number, percent


def validation_tables(validation: Validation) -> RenderableType:
    """Every row, then the medians; errors are predicted over published, minus 1."""
    rows = figures(
        "row",
        "plain",
        "ours",
        "error",
        "gain",
        "ours",
        "error",
        caption="plain tokens/s and speed-up as published; ours are predicted",
    )
    below = []
    for row in validation.rows:
        if isinstance(row, Skipped):
            below.append(Text(f"skipped {row.id}: {row.reason}", style="yellow"))
            continue
        if row.assumed:
            below.append(Text(f"assumed of {row.id}: {'; '.join(row.assumed)}"))
        rows.add_row(
            row.id,
            number(row.published_plain),
            f"{row.plain:.1f}",
            percent(row.plain_error),
            number(row.published_speedup, 2),
            f"{row.speedup:.2f}",
            percent(row.speedup_error),
        )
    notes = [Text(note, style="yellow") for note in validation.notes]
    return Group(rows, *below, *notes, _median_table(validation))


def _median_table(validation: Validation) -> Table:
    table = figures("median absolute error", "rows", "speed-up", "plain tokens/s")
    for name, medians in _groups(validation):
        table.add_row(
            name, str(medians.rows), percent(medians.speedup, ""), percent(medians.plain, "")
        )
    return table


def _groups(validation: Validation) -> list[tuple[str, Medians]]:
    by_engine = [(name, validation.medians(name)) for name in validation.engines]
    return [("all", validation.medians()), *by_engine]


def validation_json(validation: Validation) -> dict[str, Any]:
    """All rows and the medians, errors as signed fractions."""
    return {
        "kind": "prediction",
        "rows": [
            _skipped_json(row) if isinstance(row, Skipped) else _row_json(row)
            for row in validation.rows
        ],
        "skipped": sum(isinstance(row, Skipped) for row in validation.rows),
        "notes": list(validation.notes),
        **_medians_json(validation.medians()),
        "by_engine": {name: _medians_json(validation.medians(name)) for name in validation.engines},
    }


def _row_json(row: Prediction) -> dict[str, Any]:
    return {
        "id": row.id,
        "engine": row.engine,
        "family": find_family(row.engine).name,
        "n": row.draft_tokens,
        "plain_tok_s": row.published_plain,
        "predicted_plain_tok_s": row.plain,
        "plain_error": row.plain_error,
        "mtp_tok_s": row.published_mtp,
        "predicted_mtp_tok_s": row.mtp,
        "mtp_error": row.mtp_error,
        "speedup": row.published_speedup,
        "predicted_speedup": row.speedup,
        "speedup_error": row.speedup_error,
        "assumed": list(row.assumed),
        "skipped": None,
    }


def _skipped_json(row: Skipped) -> dict[str, Any]:
    """The same keys as a predicted row, so that a program need not tell them apart."""
    figures = ("plain_error", "mtp_error", "speedup_error")
    return {
        "id": row.id,
        "engine": row.engine,
        **dict.fromkeys(figures),
        "skipped": row.reason,
    }


def _medians_json(medians: Medians) -> dict[str, Any]:
    return {
        "rows_predicted": medians.rows,
        "median_abs_speedup_error": medians.speedup,
        "median_abs_plain_error": medians.plain,
    }
