"""A page as Markdown, to paste into an issue.

Owns Markdown's form. Figures are files of their own, linked from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from serving.studies.report.content import Page, Table

# An underscore within a word and brackets without an address are only themselves.
_MARKUP = re.compile(r"([\\`*<]|(?<!\w)_|_(?!\w)|\](?=[(\[:]))")


def to_markdown(page: Page, figures: str) -> str:
    """The page; `figures` is the folder of its SVG files, relative to it."""
    return "\n".join(_lines(page, figures)).rstrip() + "\n"


def _lines(page: Page, figures: str) -> Iterator[str]:
    yield from (f"# {_text(page.title)}", "", _text(page.over), "")
    yield from (f"*{_text(page.question)}*", "", f"**{_text(page.answer)}**", "")
    yield from (f"- ⚠ **{_text(each.term)}**: {_text(each.text)}" for each in page.flags)
    yield from ("", _text(page.facts), "")
    if page.drawings:
        yield from ("## Figures", "")
    for drawing in page.drawings:
        chart = drawing.chart
        yield from (f"### {_text(chart.title)}", "")
        yield from (f"![{_text(chart.alt)}]({figures}/{chart.name}.svg)", "")
        yield from (_text(chart.caption), "")
    yield from ("## Tables", "")
    for table in page.tables:
        yield from _table(table)
    yield from ("## How it was measured", "")
    yield from (f"- **{_text(each.term)}.** {_text(each.text)}" for each in page.method)
    yield from ("", "## How to reproduce it", "", *_fenced(page.commands, "sh"))
    for table in page.background:
        yield from _table(table)
    for title, text in page.files:
        yield from (f"### {_text(title)}", "", *_fenced(text, "yaml"))


def _table(table: Table) -> Iterator[str]:
    yield from (f"### {_text(table.title)}", "")
    yield _row(column.label for column in table.columns)
    yield _rule(table)
    yield from (_row(row) for row in table.rows)
    yield ""
    if table.note:
        yield from (_text(table.note), "")


def _rule(table: Table) -> str:
    return "|" + "|".join("--:" if column.number else "---" for column in table.columns) + "|"


def _row(cells: Iterator[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(_text(cell).replace("|", "\\|") for cell in cells) + " |"


def _text(text: str) -> str:
    """As it is: in one line, and nothing in it taken for HTML or Markdown."""
    escaped = re.sub(_MARKUP, r"\\\1", " ".join(text.split()))
    return re.sub(r"^([#>+-])", r"\\\1", escaped)


def _fenced(text: str, language: str) -> tuple[str, ...]:
    """A code block, its fence longer than any within."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}", text.rstrip(), fence, ""
