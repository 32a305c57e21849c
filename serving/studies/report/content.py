"""What a page says, before it is HTML or Markdown.

Owns the parts of a page and how a figure is written in words. Leaves where the figures come
from to `charts` and `tables`, and looks to `html` and `markdown`.
"""

from __future__ import annotations

from dataclasses import dataclass

from serving.studies.report.plots import Drawing
from serving.studies.statistics import Estimate

NONE = "–"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table; numbers stand to the right."""

    label: str
    number: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """A table, all cells written out."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Remark:
    """A short text under a term: a flag, or how something was measured."""

    term: str
    text: str


@dataclass(frozen=True, slots=True)
class Page:
    """A report or a comparison, top to bottom."""

    over: str
    """The line over the title: what, on what, when."""
    title: str
    question: str
    answer: str
    flags: tuple[Remark, ...]
    facts: str
    drawings: tuple[Drawing, ...]
    tables: tuple[Table, ...]
    method: tuple[Remark, ...]
    commands: str
    """How to reproduce it, as a shell would take it."""
    background: tuple[Table, ...]
    """Environment and arms."""
    files: tuple[tuple[str, str], ...]
    """Title and text of what the run was made from: the study file, the stack file."""


def number(value: float | None, digits: int = 2) -> str:
    """With so many decimals and separated thousands; a dash for none."""
    return NONE if value is None else f"{value:,.{digits}f}"


def milliseconds(seconds: float | None) -> str:
    """Milliseconds with three significant digits, or whole ones from 100 ms."""
    if seconds is None:
        return NONE
    value = 1e3 * seconds
    return number(value, 0 if value >= 100 else 1 if value >= 10 else 2)


def interval(estimate: Estimate | None, digits: int = 2) -> str:
    """`1.80 [1.70, 1.90]`; the value alone where it has no interval."""
    if estimate is None:
        return NONE
    value = number(estimate.value, digits)
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} [{number(estimate.low, digits)}, {number(estimate.high, digits)}]"
