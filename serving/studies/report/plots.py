"""Charts as SVG: curves over a number, and rows of points over names.

Owns how a chart looks: Okabe and Ito's colours, which readers with any colour vision can
tell apart, and for every line a marker and a dash of its own. Leaves which figures there
are to `charts`. A chart comes in two forms: one to stand inside a page, coloured by the
page's CSS variables, and one to stand alone.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

# A column of a page is about this wide, so a phone shrinks the text only little.
WIDTH_IN = 4.3
HEIGHT_IN = 3.0
ROW_IN = 0.19
MIN_ROWS_IN = 1.6
MAX_ROWS = 24
DODGE = 0.008
"""Of the width of x, between two lines."""
LEGEND_CHARS = 56
MARK_CHARS = 7

# Text stays text, in the reader's own font; a "$" in a name is a dollar, not mathematics.
SETTINGS: dict[Any, Any] = {"svg.fonttype": "none", "font.size": 9, "text.parse_math": False}
FONT = "system-ui, 'Segoe UI', Roboto, Helvetica, sans-serif"
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)))


@dataclass(frozen=True, slots=True)
class Ink:
    """One colour: its CSS variable in a page, its value in light and in dark."""

    variable: str
    light: str
    dark: str


# Drawn in the light value, which is then exchanged for the variable: no two may be equal.
TEXT = Ink("--ink", "#1d1f23", "#e7e5e0")
FAINT = Ink("--faint", "#5f636b", "#a4a7ad")
RULE = Ink("--rule", "#dedbd4", "#34373d")
# Okabe and Ito (2008), but for yellow, too pale on paper; lighter where the page is dark.
SERIES = (
    Ink("--blue", "#0072b2", "#56a8e0"),
    Ink("--vermillion", "#d55e00", "#f0813a"),
    Ink("--green", "#009e73", "#2fc398"),
    Ink("--purple", "#cc79a7", "#dd94bd"),
    Ink("--orange", "#e69f00", "#efb73e"),
    Ink("--sky", "#56b4e9", "#8fcdf2"),
)
INKS = (TEXT, FAINT, RULE, *SERIES)


@dataclass(frozen=True, slots=True)
class Point:
    """A value `y` at `x`, and its interval where it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """The points of one arm, in the order of x. `style` is the same in every chart of a page."""

    label: str
    points: tuple[Point, ...]
    style: int
    """0 is drawn in the colour of text, for what the others are compared with."""


@dataclass(frozen=True, slots=True)
class Chart:
    """What is to be drawn, and its words.

    With `rows`, a point's x is the place of its row, and values run from left to right.
    """

    name: str
    """Stem of its file."""
    title: str
    caption: str
    alt: str
    """What a reader who cannot see it is told."""
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    rows: tuple[str, ...] = ()
    reference: float | None = None
    """A value to compare with, drawn as a thin rule."""
    from_zero: bool = True
    doubling_x: bool = False
    """Whether x is drawn in powers of two."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A drawn chart."""

    chart: Chart
    inline: str
    """SVG to stand in a page that sets the variables of `INKS`."""
    standalone: str
    """SVG to stand in a file of its own."""


def draw(chart: Chart) -> Drawing:
    """Draw a chart. The same chart gives the same bytes."""
    with matplotlib.rc_context(SETTINGS | {"svg.hashsalt": chart.name}):
        figure = Figure(figsize=_size(chart), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        if chart.rows:
            _draw_rows(axes, chart)
        else:
            _draw_curves(axes, chart)
        _dress(axes, chart)
        svg = _tidy(_svg(figure))
    return Drawing(chart, _with_variables(svg), _alone(svg))


def _size(chart: Chart) -> tuple[float, float]:
    if not chart.rows:
        return WIDTH_IN, HEIGHT_IN
    # A row has room for its arms, one below the other.
    per_row = ROW_IN * (1 + 0.6 * max(len(chart.lines), 1))
    return WIDTH_IN, max(MIN_ROWS_IN, 0.9 + per_row * min(len(chart.rows), MAX_ROWS))


def _draw_curves(axes: Axes, chart: Chart) -> None:
    places = sorted({point.x for line in chart.lines for point in line.points})
    doubling = chart.doubling_x and places[0] > 0
    if doubling:
        axes.set_xscale("log", base=2)
    for number, line in enumerate(chart.lines):
        _plot(axes, _beside(line, number - (len(chart.lines) - 1) / 2, places, doubling))
    if len(places) <= 12:
        axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.margins(x=0.06, y=0.12)
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    if chart.reference is not None:
        axes.axhline(chart.reference, color=FAINT.light, linewidth=0.9, zorder=1)


def _draw_rows(axes: Axes, chart: Chart) -> None:
    shown = min(len(chart.rows), MAX_ROWS)
    step = 0.64 / max(len(chart.lines), 1)
    for number, line in enumerate(chart.lines):
        shift = (number - (len(chart.lines) - 1) / 2) * step
        moved = tuple(replace(point, x=point.x + shift) for point in line.points if point.x < shown)
        _plot(axes, replace(line, points=moved), lying=True)
    axes.set_yticks(range(shown), chart.rows[:shown])
    axes.set_ylim(shown - 0.5, -0.5)
    axes.set_xlabel(chart.y_label)
    axes.margins(x=0.08)
    if chart.from_zero:
        axes.set_xlim(left=0)
    if chart.reference is not None:
        axes.axvline(chart.reference, color=FAINT.light, linewidth=0.9, zorder=1)


def _beside(line: Line, place: float, places: Sequence[float], doubling: bool) -> Line:
    """Moved a hair to the side, so that the intervals of two lines do not cover each other."""
    if len(places) < 2:
        return line
    shift = place * DODGE
    if doubling:
        factor = (places[-1] / places[0]) ** shift
        return replace(line, points=tuple(replace(at, x=at.x * factor) for at in line.points))
    width = places[-1] - places[0]
    return replace(line, points=tuple(replace(at, x=at.x + width * shift) for at in line.points))


def _plot(axes: Axes, line: Line, *, lying: bool = False) -> None:
    ink = TEXT if line.style == 0 else SERIES[(line.style - 1) % len(SERIES)]
    x = [point.x for point in line.points]
    y = [point.y for point in line.points]
    spread = [
        [point.y - (point.y if point.low is None else point.low) for point in line.points],
        [(point.y if point.high is None else point.high) - point.y for point in line.points],
    ]
    axes.errorbar(
        y if lying else x,
        x if lying else y,
        xerr=spread if lying else None,
        yerr=None if lying else spread,
        label=line.label,
        color=ink.light,
        marker=MARKERS[line.style % len(MARKERS)],
        markersize=4.5,
        markeredgewidth=0,
        linestyle="none" if lying else DASHES[line.style % len(DASHES)],
        linewidth=1.5,
        elinewidth=1.1,
    )


def _dress(axes: Axes, chart: Chart) -> None:
    axes.set_facecolor("none")
    axes.figure.patch.set_alpha(0)
    axes.grid(axis="x" if chart.rows else "y", color=RULE.light, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(RULE.light)
    axes.tick_params(length=0, labelcolor=FAINT.light, pad=5)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(FAINT.light)
    if chart.rows:
        axes.tick_params(axis="y", labelcolor=TEXT.light)
    if len(chart.lines) > 1:
        axes.figure.legend(
            loc="outside upper left",
            ncols=_legend_columns(chart),
            frameon=False,
            handlelength=2.2,
            columnspacing=1.4,
            labelcolor=TEXT.light,
        )


def _legend_columns(chart: Chart) -> int:
    """As few rows as fit, and all of them as long as each other."""
    longest = max(len(line.label) for line in chart.lines)
    fitting = max(1, LEGEND_CHARS // (longest + MARK_CHARS))
    rows = math.ceil(len(chart.lines) / fitting)
    return math.ceil(len(chart.lines) / rows)


def _svg(figure: Figure) -> str:
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", metadata=nothing)
    return file.getvalue()


def _tidy(svg: str) -> str:
    """Only the drawing: no prologue, no ids but those used, no font but the reader's."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    used = set(re.findall(r"(?:href=\"|url\()#([^\")]+)", svg))
    svg = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", svg)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*", f"font-family: {FONT}", svg)
    svg = re.sub(r"(<g/>|\s*\n)\s*", r"\n", svg)
    return svg.strip()


def _with_variables(svg: str) -> str:
    variables = {ink.light: f"var({ink.variable})" for ink in INKS}
    return re.sub(
        r"(fill|stroke): (#[0-9a-f]{6})",
        lambda found: f"{found[1]}: {variables.get(found[2], found[2])}",
        svg,
    )


def _alone(svg: str) -> str:
    """With a paper of its own, as a viewer's may be dark."""
    start, end = svg.split(">", 1)
    return f'{start}>\n<rect width="100%" height="100%" fill="#ffffff"/>{end}\n'
