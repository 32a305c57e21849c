"""How the planner's tables look, and how their cells are written.

Owns the one style and the number formats. Leaves what stands in a table to `report` and
`validation_report`.
"""

from __future__ import annotations

from rich import box
from rich.table import Column, Table

from serving.planner.memory import GIB

MIB = 1024**2


def figures(first: str, *others: str, title: str = "", caption: str = "") -> Table:
    """A table of figures: names on the left that stay whole, numbers on the right."""
    return Table(
        Column(first, no_wrap=True),
        *(Column(each, justify="right") for each in others),
        title=title or None,
        title_justify="left",
        caption=caption or None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )


def size(value: float | None, unit: int = GIB) -> str:
    """Bytes in GiB or MiB."""
    return "?" if value is None else f"{value / unit:.2f}"


def yes(value: bool | None) -> str:
    """Yes, no or not known."""
    return "?" if value is None else "yes" if value else "no"


def count(value: int | None) -> str:
    """A whole number, or not known."""
    return "?" if value is None else str(value)


def number(value: float | None, digits: int = 1) -> str:
    """A number, or nothing."""
    return "" if value is None else f"{value:.{digits}f}"


def percent(value: float | None, sign: str = "+") -> str:
    """A share of 1 in per cent, with its sign, or nothing."""
    return "" if value is None else f"{value:{sign}.1%}"
