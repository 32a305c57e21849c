"""A run's report: one HTML file, Markdown, CSV, and two runs side by side.

Owns the files of a report and what they look like. Leaves what the figures mean to
`serving.studies.analysis`. Needs the extra `loadtest`.
"""

from __future__ import annotations

from pathlib import Path

from serving.studies.analysis import analyse
from serving.studies.records import Run
from serving.studies.report import tables
from serving.studies.report.compare import comparison_of
from serving.studies.report.content import Page
from serving.studies.report.html import to_html
from serving.studies.report.markdown import to_markdown
from serving.studies.report.run_page import page_of

FIGURES = "figures"

__all__ = ["write_comparison", "write_report"]


def write_report(folder: Path) -> list[Path]:
    """Write the report of the run in `folder` into it; returns the files, the HTML first.

    `report.html` stands by itself; `report.md` shows `figures/*.svg`; `summary.csv`,
    `acceptance.csv` and `requests.csv` are for other programs. Those of an earlier report are
    replaced. Raises RecordsError where the folder holds no run.
    """
    run = Run.read(folder)
    analysis = analyse(run)
    page = page_of(run, analysis)
    return [
        _written(folder / "report.html", to_html(page)),
        _written(folder / "report.md", to_markdown(page, FIGURES)),
        tables.write_summary(analysis, folder / "summary.csv"),
        tables.write_acceptance(analysis, folder / "acceptance.csv"),
        tables.write_requests(run.requests, folder / "requests.csv"),
        *_figures(page, folder / FIGURES),
    ]


def write_comparison(a: Path, b: Path, out: Path) -> Path:
    """Write the runs of the folders `a` and `b` side by side into the HTML file `out`.

    Raises RecordsError where a folder holds no run.
    """
    return _written(out, to_html(comparison_of(Run.read(a), Run.read(b))))


def _figures(page: Page, folder: Path) -> list[Path]:
    for old in folder.glob("*.svg"):
        old.unlink()
    return [
        _written(folder / f"{drawing.chart.name}.svg", drawing.standalone)
        for drawing in page.drawings
    ]


def _written(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file
