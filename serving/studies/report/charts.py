"""Which charts a report has, out of an analysis.

Owns what is drawn over what, and the words around it. Leaves how it looks to `plots` and every
figure to `analysis`. Points are of cells, never of single requests, so a chart is as small
for a hundred thousand requests as for a hundred.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from serving.studies import statistics
from serving.studies.analysis.answer import headline, streams_in_words
from serving.studies.analysis.findings import Acceptance, Analysis, Load, Setting, Speedup
from serving.studies.report.plots import Chart, Line, Point
from serving.studies.statistics import Estimate

MAX_LEVELS = 5
"""Lines by number of streams in one chart."""
INTERVALS = "Bars are 95 % intervals."
QUANTILES = "Median; bars reach to the 95th percentile of requests."
_DEPTH = re.compile(r"(?P<category>.+)\+(?P<tokens>\d+)")


def held(analysis: Analysis) -> Setting | None:
    """What charts hold equal that show something else: the setting of the answer.

    Without one the fewest streams and longest answers, all categories together. None where
    nothing was asked.
    """
    best = headline(analysis)
    settings = [best.setting] if best else [load.setting for load in analysis.loads]
    return min(
        settings,
        key=lambda each: (each.temperature, each.streams, -each.max_tokens),
        default=None,
    )


def answers_in_words(setting: Setting) -> str:
    """What the answers of a setting were, as a caption ends."""
    return f"Answers of up to {setting.max_tokens} tokens at temperature {setting.temperature:g}."


def charts(analysis: Analysis) -> tuple[Chart, ...]:
    """The charts that this run has points for, in the order of a report."""
    at = held(analysis)
    if at is None:
        return ()
    view = View(analysis, at)
    candidates = (
        view.speedup_by_n(),
        view.speedup_by_arm(),
        view.acceptance_by_place(),
        view.speedup_by_streams(),
        view.throughput(),
        view.tpot(),
        view.ttft(),
        view.speedup_by_category(),
        view.acceptance_by_category(),
        view.speedup_by_length(),
        view.acceptance_by_depth(),
    )
    return tuple(chart for chart in candidates if chart is not None)


@dataclass(frozen=True, slots=True)
class View:
    """One run, seen at one setting."""

    analysis: Analysis
    at: Setting

    def style(self, arm: str) -> int:
        """The same for an arm in every chart; 0 is plain's."""
        study = self.analysis.study
        return study.arm_names.index(arm) + (study.plain is None)

    def speedups(
        self, arm: str, *, overall: bool, streams: int | None, max_tokens: int | None
    ) -> Iterator[Speedup]:
        """An arm's, all categories in one or one by one; None takes every value."""
        for each in self.analysis.speedups:
            setting = each.setting
            if (
                each.arm == arm
                and setting.temperature == self.at.temperature
                and (setting.category is None) == overall
                and streams in (None, setting.streams)
                and max_tokens in (None, setting.max_tokens)
            ):
                yield each

    def loads(self, arm: str) -> tuple[Load, ...]:
        """An arm's, at the held length and temperature, by streams."""
        return tuple(
            each
            for each in self.analysis.loads
            if each.arm == arm
            and each.setting.temperature == self.at.temperature
            and each.setting.max_tokens == self.at.max_tokens
        )

    def acceptances(self, arm: str) -> tuple[Acceptance, ...]:
        """An arm's at the held temperature, all categories together among them."""
        return tuple(
            each
            for each in self.analysis.acceptances
            if each.arm == arm and each.temperature == self.at.temperature
        )

    def drafting_by_n(self) -> dict[int, str]:
        """Arms by n; empty where an n is not known, or two arms share one."""
        found: dict[int, str] = {}
        for arm in self.analysis.study.arms:
            if arm.name == self.analysis.study.plain:
                continue
            if not arm.draft_tokens or arm.draft_tokens in found:
                return {}
            found[arm.draft_tokens] = arm.name
        return dict(sorted(found.items()))

    def levels(self) -> tuple[int, ...]:
        """Numbers of streams that were tried, open-loop load (0) left out."""
        return tuple(sorted({each.setting.streams for each in self.analysis.loads} - {0}))

    # Points

    def points_by_n(self, streams: int) -> tuple[Point, ...]:
        """Decode speed-up over n."""
        return tuple(
            _point(n, each.decode)
            for n, arm in self.drafting_by_n().items()
            for each in self.speedups(
                arm, overall=True, streams=streams, max_tokens=self.at.max_tokens
            )
            if each.decode
        )

    def points_by_streams(self, arm: str) -> tuple[Point, ...]:
        """Decode speed-up over the number of streams."""
        found = self.speedups(arm, overall=True, streams=None, max_tokens=self.at.max_tokens)
        return tuple(
            _point(each.setting.streams, each.decode)
            for each in found
            if each.decode and each.setting.streams
        )

    def points_by_place(self, arm: str) -> tuple[Point, ...]:
        """Acceptance rate over the place in the draft, from 1; all categories together."""
        return tuple(
            _point(place, rate)
            for each in self.acceptances(arm)
            if each.category is None
            for place, rate in enumerate(each.per_position, 1)
        )

    def load_points(self, arm: str, read: Callable[[Load], Point | None]) -> tuple[Point, ...]:
        """What `read` makes of each load, over the number of streams."""
        points = (read(each) for each in self.loads(arm) if each.setting.streams)
        return tuple(point for point in points if point)

    # Charts

    def speedup_by_n(self) -> Chart | None:
        """Decode speed-up over n, a line for each number of streams."""
        if len(self.drafting_by_n()) < 2:
            return None
        shown = _spread(self.levels())
        lines = [
            Line(streams_in_words(level), self.points_by_n(level), number)
            for number, level in enumerate(shown)
        ]
        left_out = len(self.levels()) - len(shown)
        more = f" {left_out} more numbers of streams are in the table." if left_out else ""
        return speedup_chart(
            lines,
            name="speedup-by-n",
            title="Decode speed-up by number of draft tokens",
            caption=f"Over plain, all categories; 1 is plain's own speed. {INTERVALS} "
            f"{answers_in_words(self.at)}{more}",
            x_label="draft tokens n",
        )

    def speedup_by_arm(self) -> Chart | None:
        """Decode speed-up in rows of arms, where neither n nor streams make a curve."""
        if len(self.drafting_by_n()) > 1 or len(self.levels()) > 1:
            return None
        found = [
            (arm, each.decode)
            for arm in self.analysis.study.arm_names
            for each in self.speedups(
                arm, overall=True, streams=self.at.streams, max_tokens=self.at.max_tokens
            )
            if each.decode
        ]
        points = tuple(_point(row, estimate) for row, (_, estimate) in enumerate(found))
        return speedup_chart(
            [Line(streams_in_words(self.at.streams), points, 0)],
            name="speedup-by-arm",
            title=f"Decode speed-up, {streams_in_words(self.at.streams)}",
            caption=f"Over plain, all categories. {INTERVALS} {answers_in_words(self.at)}",
            x_label="arm",
            rows=tuple(arm for arm, _ in found),
        )

    def acceptance_by_place(self) -> Chart | None:
        """Per-position acceptance, a line for each arm."""
        return chart_of(
            self._by_arm(self.points_by_place),
            name="acceptance-by-place",
            title="Acceptance by place in the draft",
            caption="Share of drafts whose token at this place, and all before it, were "
            f"accepted; all categories. {INTERVALS} Flat near 1 means a text that loops.",
            x_label="place in the draft",
            y_label="acceptance rate",
        )

    def speedup_by_streams(self) -> Chart | None:
        """Decode speed-up over the number of streams, a line for each arm."""
        if len(self.levels()) < 2:
            return None
        return speedup_chart(
            self._by_arm(self.points_by_streams),
            name="speedup-by-streams",
            title="Decode speed-up by number of streams",
            caption=f"Over plain, all categories. {INTERVALS} {answers_in_words(self.at)}",
            x_label="streams",
            doubling_x=True,
        )

    def throughput(self) -> Chart | None:
        """Tokens per second of all streams."""
        return self._load_chart(
            _throughput_point,
            name="throughput",
            title="Throughput",
            caption="Output tokens of all streams together, by the time in which at least one "
            f"request ran. {answers_in_words(self.at)}",
            y_label="tokens/s",
        )

    def tpot(self) -> Chart | None:
        """Time per output token."""
        return self._load_chart(
            tpot_point,
            name="tpot",
            title="Time per output token (TPOT)",
            caption=f"{QUANTILES} {answers_in_words(self.at)}",
            y_label="TPOT (ms)",
        )

    def ttft(self) -> Chart | None:
        """Time to the first token."""
        return self._load_chart(
            ttft_point,
            name="ttft",
            title="Time to first token (TTFT)",
            caption=f"{QUANTILES} {answers_in_words(self.at)}",
            y_label="TTFT (ms)",
        )

    def speedup_by_category(self) -> Chart | None:
        """Decode speed-up in rows of categories, a mark for each arm."""
        rows = self._categories(each.setting.category for each in self.analysis.speedups)
        if len(rows) < 2:
            return None

        def points(arm: str) -> tuple[Point, ...]:
            found = self.speedups(
                arm, overall=False, streams=self.at.streams, max_tokens=self.at.max_tokens
            )
            return tuple(
                _point(rows.index(each.setting.category), each.decode)
                for each in found
                if each.decode and each.setting.category
            )

        return speedup_chart(
            self._by_arm(points),
            name="speedup-by-category",
            title=f"Decode speed-up by category, {streams_in_words(self.at.streams)}",
            caption=f"Over plain. {INTERVALS} {answers_in_words(self.at)}",
            x_label="category",
            rows=rows,
        )

    def acceptance_by_category(self) -> Chart | None:
        """Acceptance rate in rows of categories, a mark for each arm."""
        rows = self._categories(each.category for each in self.analysis.acceptances)
        if len(rows) < 2:
            return None

        def points(arm: str) -> tuple[Point, ...]:
            return tuple(
                _point(rows.index(each.category), each.rate)
                for each in self.acceptances(arm)
                if each.category
            )

        return chart_of(
            self._by_arm(points),
            name="acceptance-by-category",
            title="Acceptance rate by category",
            caption=f"Accepted of all drafted tokens, over all numbers of streams. {INTERVALS}",
            x_label="category",
            y_label="acceptance rate",
            rows=rows,
        )

    def speedup_by_length(self) -> Chart | None:
        """End-to-end speed-up over the longest answer allowed, a line for each arm."""

        def points(arm: str) -> tuple[Point, ...]:
            found = self.speedups(arm, overall=True, streams=self.at.streams, max_tokens=None)
            return tuple(_point(each.setting.max_tokens, each.end_to_end) for each in found)

        lines = self._by_arm(points)
        if len({point.x for line in lines for point in line.points}) < 2:
            return None
        return speedup_chart(
            lines,
            name="speedup-by-length",
            title=f"End-to-end speed-up by output length, {streams_in_words(self.at.streams)}",
            caption=f"Over plain, the prompt's processing included, all categories. {INTERVALS}",
            x_label="longest answer (tokens)",
            doubling_x=True,
        )

    def acceptance_by_depth(self) -> Chart | None:
        """Acceptance rate over the tokens before the prompt, a line for each arm."""

        def points(arm: str) -> tuple[Point, ...]:
            counts: dict[int, list[int]] = {}
            for each in self.acceptances(arm):
                if each.category and (found := _DEPTH.fullmatch(each.category)):
                    sums = counts.setdefault(int(found["tokens"]), [0, 0])
                    sums[0] += each.accepted
                    sums[1] += each.drafted
            return tuple(
                _point(depth, statistics.acceptance_rate(accepted, drafted))
                for depth, (accepted, drafted) in sorted(counts.items())
            )

        return chart_of(
            self._by_arm(points),
            name="acceptance-by-depth",
            title="Acceptance rate by depth",
            caption="Accepted of all drafted tokens, over the tokens of text before the prompt. "
            f"{INTERVALS}",
            x_label="tokens before the prompt",
            y_label="acceptance rate",
        )

    def _by_arm(self, points: Callable[[str], tuple[Point, ...]]) -> list[Line]:
        return [Line(arm, points(arm), self.style(arm)) for arm in self.analysis.study.arm_names]

    def _load_chart(
        self,
        read: Callable[[Load], Point | None],
        *,
        name: str,
        title: str,
        caption: str,
        y_label: str,
    ) -> Chart | None:
        """Over streams, a line for each arm; in rows of arms where one level was tried."""
        if len(self.levels()) > 1:
            return chart_of(
                self._by_arm(lambda arm: self.load_points(arm, read)),
                name=name,
                title=title,
                caption=caption,
                x_label="streams",
                y_label=y_label,
                doubling_x=True,
            )
        found = [
            (arm, read(load))
            for arm in self.analysis.study.arm_names
            for load in self.loads(arm)[:1]
        ]
        rows = [(arm, point) for arm, point in found if point]
        points = tuple(
            Point(row, point.y, point.low, point.high) for row, (_, point) in enumerate(rows)
        )
        return chart_of(
            [Line(streams_in_words(self.at.streams), points, 0)],
            name=name,
            title=f"{title}, {streams_in_words(self.at.streams)}",
            caption=caption,
            x_label="arm",
            y_label=y_label,
            rows=tuple(arm for arm, _ in rows),
        )

    def _categories(self, found: Iterable[str | None]) -> tuple[str, ...]:
        names = {name for name in found if name is not None}
        return tuple(sorted(names, key=_natural))


def chart_of(
    lines: Sequence[Line],
    *,
    name: str,
    title: str,
    caption: str,
    x_label: str,
    y_label: str,
    rows: tuple[str, ...] = (),
    reference: float | None = None,
    from_zero: bool = True,
    doubling_x: bool = False,
) -> Chart | None:
    """A chart of the lines that have points, with its words for those who do not see it."""
    kept = tuple(line for line in lines if line.points)
    if not kept:
        return None
    return Chart(
        name=name,
        title=title,
        caption=caption,
        alt=_alt(title, kept, x_label, y_label, rows),
        x_label=x_label,
        y_label=y_label,
        lines=kept,
        rows=rows,
        reference=reference,
        from_zero=from_zero,
        doubling_x=doubling_x,
    )


def speedup_chart(
    lines: Sequence[Line],
    *,
    name: str,
    title: str,
    caption: str,
    x_label: str,
    rows: tuple[str, ...] = (),
    doubling_x: bool = False,
) -> Chart | None:
    """A chart of speed-ups, with a rule at 1, where the arm is as fast as plain."""
    return chart_of(
        lines,
        name=name,
        title=title,
        caption=caption,
        x_label=x_label,
        y_label="speed-up (×)",
        rows=rows,
        reference=1.0,
        from_zero=False,
        doubling_x=doubling_x,
    )


def _alt(
    title: str, lines: Sequence[Line], x_label: str, y_label: str, rows: tuple[str, ...]
) -> str:
    """The chart in words: the lowest and the highest value of each line."""

    def told(point: Point) -> str:
        value = f"{point.y:,.0f}" if abs(point.y) >= 1000 else f"{point.y:.3g}"
        return f"{value} at {rows[int(point.x)] if rows else f'{point.x:g}'}"

    lowest_to_highest = []
    for line in lines:
        ends = min(line.points, key=_height), max(line.points, key=_height)
        words = " to ".join(dict.fromkeys(map(told, ends)))
        lowest_to_highest.append(f"{line.label} {words}")
    return f"{title}: {y_label} over {x_label}. {'; '.join(lowest_to_highest)}."


def _height(point: Point) -> float:
    return point.y


def _point(x: float, estimate: Estimate) -> Point:
    return Point(x, estimate.value, estimate.low, estimate.high)


def tpot_point(load: Load) -> Point | None:
    """Median TPOT in ms, at the load's number of streams, its bar up to the 95th percentile."""
    return _latency_point(load, load.tpot_median_s, load.tpot_p95_s)


def ttft_point(load: Load) -> Point | None:
    """The same of TTFT."""
    return _latency_point(load, load.ttft_median_s, load.ttft_p95_s)


def _latency_point(load: Load, median_s: float | None, p95_s: float | None) -> Point | None:
    if median_s is None or p95_s is None:
        return None
    return Point(load.setting.streams, 1e3 * median_s, 1e3 * median_s, 1e3 * p95_s)


def _throughput_point(load: Load) -> Point | None:
    return None if load.tokens_per_s is None else Point(load.setting.streams, load.tokens_per_s)


def _spread(levels: Sequence[int]) -> tuple[int, ...]:
    """At most MAX_LEVELS of them, first and last among them."""
    if len(levels) <= MAX_LEVELS:
        return tuple(levels)
    step = (len(levels) - 1) / (MAX_LEVELS - 1)
    return tuple(levels[round(place * step)] for place in range(MAX_LEVELS))


def _natural(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Numbers within a name in the order of their value: code+64 before code+1024."""
    parts = re.split(r"(\d+)", name)
    return tuple((part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts)
