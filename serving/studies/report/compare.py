"""Two runs side by side: two GPUs, two engines, two versions.

Owns which arms of one run stand beside which of the other, and naming what else differs.
Speed-ups are compared by their intervals; tokens/s and times come from two machines at two
times, are in no pairs, and are shown without a verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from serving.studies.analysis import analyse
from serving.studies.analysis.answer import streams_in_words, times_in_words
from serving.studies.analysis.findings import Acceptance, Analysis, Load, Setting, Speedup
from serving.studies.records import Run
from serving.studies.report import run_page, tables
from serving.studies.report.charts import (
    INTERVALS,
    QUANTILES,
    View,
    answers_in_words,
    chart_of,
    held,
    speedup_chart,
    tpot_point,
    ttft_point,
)
from serving.studies.report.content import (
    NONE,
    Page,
    Remark,
    Table,
    interval,
    milliseconds,
    number,
)
from serving.studies.report.plots import Chart, Line, Point, draw
from serving.studies.statistics import Estimate

MAX_DIFFERENCES = 60
MAX_CHARS = 200
NAMES = ("A", "B")

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two runs."""

    name: str
    run: Run
    analysis: Analysis


@dataclass(frozen=True, slots=True)
class ArmPair:
    """One arm in both runs; the names differ where they were matched by n."""

    a: str
    b: str

    @property
    def label(self) -> str:
        """Both names, or the one."""
        return self.a if self.a == self.b else f"{self.a} / {self.b}"

    def on(self, side: Side) -> str:
        """Its name in one of the runs."""
        return self.a if side.name == NAMES[0] else self.b


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both runs, and what they have in common."""

    a: Side
    b: Side
    arms: tuple[ArmPair, ...]
    """Those in both, plain first."""

    def speedups(self) -> Iterator[tuple[ArmPair, Speedup, Speedup]]:
        """Of the same arm in the same setting, the widest categories first."""
        ours, theirs = (
            {(each.arm, each.setting): each for each in side.analysis.speedups}
            for side in (self.a, self.b)
        )
        yield from _matched(self.arms, ours, theirs)

    def loads(self) -> Iterator[tuple[ArmPair, Load, Load]]:
        """Of the same arm in the same setting."""
        ours, theirs = (
            {(each.arm, each.setting): each for each in side.analysis.loads}
            for side in (self.a, self.b)
        )
        yield from _matched(self.arms, ours, theirs)

    def acceptances(self) -> Iterator[tuple[ArmPair, Acceptance, Acceptance]]:
        """Of the same arm, category and temperature."""
        ours, theirs = (
            {
                (each.arm, (each.category, each.temperature)): each
                for each in side.analysis.acceptances
            }
            for side in (self.a, self.b)
        )
        yield from _matched(self.arms, ours, theirs)


def comparison_of(a: Run, b: Run) -> Page:
    """The page that sets run `a` beside run `b`."""
    sides = [Side(name, run, analyse(run)) for name, run in zip(NAMES, (a, b), strict=True)]
    both = Comparison(sides[0], sides[1], _arms_in_both(a, b))
    return Page(
        over=" · ".join(f"{side.name}: {_named(side)}" for side in sides),
        title=a.study.name if a.study.name == b.study.name else f"{a.study.name}, {b.study.name}",
        question="The same arm under the same load in two runs.",
        answer=_answer(both),
        flags=tuple(_flags(both)),
        facts=". ".join(
            f"{each.name}: {run_page.facts(each.run, each.analysis)}" for each in sides
        ),
        drawings=tuple(draw(chart) for chart in _charts(both)),
        tables=tuple(_tables(both)),
        method=_METHOD,
        commands="\n".join(f"# {each.name}\n{run_page.commands(each.run.study)}" for each in sides),
        background=(),
        files=tuple(
            (f"{each.name}: {title}", text)
            for each in sides
            for title, text in run_page.files(each.run.study)
        ),
    )


_METHOD = (
    Remark(
        "Speed-up",
        "Each run's own, over its own plain arm, with its 95 % interval. “No difference” means "
        "that the two intervals overlap.",
    ),
    Remark(
        "Tokens/s, TTFT, TPOT",
        "Medians of each run. The two were not measured in turns, so whatever else differed "
        "between them is in these figures.",
    ),
    Remark(
        "What is compared",
        "Arms of the same name, else of the same number of draft tokens, under the same number "
        "of streams, output length and temperature. What only one run has is left out.",
    ),
)


def _named(side: Side) -> str:
    study = side.run.study
    return f"{study.gpu}, {run_page.date_of(study)}, run {study.id}"


def _arms_in_both(a: Run, b: Run) -> tuple[ArmPair, ...]:
    theirs = {arm.name: arm for arm in b.study.arms}
    pairs = [ArmPair(arm.name, arm.name) for arm in a.study.arms if arm.name in theirs]
    if a.study.plain and b.study.plain and a.study.plain != b.study.plain:
        pairs.append(ArmPair(a.study.plain, b.study.plain))
    used = {name for pair in pairs for name in (pair.a, pair.b)}
    for n in sorted({arm.draft_tokens for arm in a.study.arms if arm.draft_tokens}):
        ours, others = (
            [arm.name for arm in run.study.arms if arm.draft_tokens == n and arm.name not in used]
            for run in (a, b)
        )
        if len(ours) == len(others) == 1:
            pairs.append(ArmPair(ours[0], others[0]))
    return tuple(sorted(pairs, key=lambda pair: pair.a != a.study.plain))


def _matched(
    arms: Sequence[ArmPair], ours: Mapping[tuple[str, Any], V], theirs: Mapping[tuple[str, Any], V]
) -> Iterator[tuple[ArmPair, V, V]]:
    for pair in arms:
        for (arm, setting), value in ours.items():
            if arm == pair.a and (pair.b, setting) in theirs:
                yield pair, value, theirs[pair.b, setting]


# Words


def _answer(both: Comparison) -> str:
    at = _held_in_both(both)
    found = None if at is None else _fastest(both, at)
    if at is None or found is None:
        return "The two runs measured no variant under the same load, so no speed-up compares."
    pair, mine, other = found
    return (
        f"At {streams_in_words(at.streams)}, {pair.label} decodes "
        f"{times_in_words(mine)} as fast as plain on A and {times_in_words(other)} on B: "
        f"{_verdict(mine, other)}{_plain_speeds(both, at)}."
    )


def _fastest(both: Comparison, at: Setting) -> tuple[ArmPair, Estimate, Estimate] | None:
    """The arm with A's largest decode speed-up, and both speed-ups."""
    return max(
        (
            (pair, mine.decode, other.decode)
            for pair, mine, other in both.speedups()
            if mine.setting == at and mine.decode and other.decode
        ),
        key=lambda each: each[1].value,
        default=None,
    )


def _held_in_both(both: Comparison) -> Setting | None:
    """The setting of A's answer where B has it too; else the first that both have."""
    shared = [mine.setting for _, mine, _ in both.speedups() if mine.setting.category is None]
    at = held(both.a.analysis)
    return at if at in shared else next(iter(shared), None)


def _plain_speeds(both: Comparison, setting: Setting) -> str:
    for pair, mine, other in both.loads():
        if pair.a == both.a.run.study.plain and mine.setting == setting:
            return (
                f"; plain takes {milliseconds(mine.tpot_median_s)} ms per token on A "
                f"and {milliseconds(other.tpot_median_s)} ms on B"
            )
    return ""


def _verdict(a: Estimate | None, b: Estimate | None) -> str:
    if a is None or b is None:
        return NONE
    if a.overlaps(b):
        return "no difference"
    return "A gains more" if a.value > b.value else "B gains more"


def _flags(both: Comparison) -> Iterator[Remark]:
    prompts_a, prompts_b = (
        {(each.category, each.prompt) for each in side.run.requests} for side in (both.a, both.b)
    )
    if prompts_a != prompts_b:
        text = (
            f"{len(prompts_a & prompts_b)} are in both runs, {len(prompts_a ^ prompts_b)} in one "
            "only, and each run's figures hold all of its own"
        )
        yield Remark("other prompts", text)
    spec = [name for name, *_ in _differing(both.a.run.study.spec, both.b.run.study.spec)]
    if spec:
        yield Remark("another study", f"the study files differ in {', '.join(spec[:12])}")
    for side in (both.a, both.b):
        for each in run_page.flags(side.analysis):
            yield Remark(f"{side.name}, {each.term}", each.text)


# Charts


def _charts(both: Comparison) -> Iterator[Chart]:
    at = _held_in_both(both)
    if at is None:
        return
    views = [(side, View(side.analysis, at)) for side in (both.a, both.b)]
    candidates = (
        _speedup_by_n(views, at),
        _by_streams(views, both, at),
        _acceptance(views, both),
        _plain(views, at, "TPOT", tpot_point),
        _plain(views, at, "TTFT", ttft_point),
    )
    yield from (chart for chart in candidates if chart is not None)


Views = Sequence[tuple[Side, View]]


def _speedup_by_n(views: Views, at: Setting) -> Chart | None:
    return speedup_chart(
        _by_gpu(views, lambda view: view.points_by_n(at.streams)),
        name="compare-speedup-by-n",
        title=f"Decode speed-up by draft tokens, {streams_in_words(at.streams)}",
        caption=f"Over each run's own plain. {INTERVALS} {answers_in_words(at)}",
        x_label="draft tokens n",
    )


def _by_streams(views: Views, both: Comparison, at: Setting) -> Chart | None:
    found = _fastest(both, at)
    if found is None or any(len(view.levels()) < 2 for _, view in views):
        return None
    pair = found[0]
    return speedup_chart(
        _of_arm(views, pair, View.points_by_streams),
        name="compare-speedup-by-streams",
        title="Decode speed-up by number of streams",
        caption=f"Of {pair.label}, over each run's own plain. {INTERVALS} {answers_in_words(at)}",
        x_label="streams",
        doubling_x=True,
    )


def _acceptance(views: Views, both: Comparison) -> Chart | None:
    found = max(both.acceptances(), key=lambda each: len(each[1].per_position), default=None)
    if found is None:
        return None
    deepest = found[0]
    return chart_of(
        _of_arm(views, deepest, View.points_by_place),
        name="compare-acceptance",
        title="Acceptance by place in the draft",
        caption=f"Of {deepest.label}, the arm with the longest drafts. {INTERVALS}",
        x_label="place in the draft",
        y_label="acceptance rate",
    )


def _plain(
    views: Views, at: Setting, name: str, read: Callable[[Load], Point | None]
) -> Chart | None:
    """TPOT or TTFT of plain over streams, both runs."""
    if any(len(view.levels()) < 2 for _, view in views):
        return None
    return chart_of(
        _by_gpu(views, lambda view: view.load_points(view.analysis.study.plain or "", read)),
        name=f"compare-{name.lower()}",
        title=f"{name} of plain",
        caption=f"{QUANTILES} {answers_in_words(at)}",
        x_label="streams",
        y_label=f"{name} (ms)",
        doubling_x=True,
    )


def _by_gpu(views: Views, points: Callable[[View], tuple[Point, ...]]) -> list[Line]:
    return [
        Line(f"{side.name}: {side.run.study.gpu}", points(view), place)
        for place, (side, view) in enumerate(views, 1)
    ]


def _of_arm(
    views: Views, pair: ArmPair, points: Callable[[View, str], tuple[Point, ...]]
) -> list[Line]:
    return [
        Line(f"{side.name}: {pair.on(side)}", points(view, pair.on(side)), place)
        for place, (side, view) in enumerate(views, 1)
    ]


# Tables


def _tables(both: Comparison) -> Iterator[Table]:
    yield _differences(both)
    found = (_speedup_table(both), _load_table(both), _acceptance_table(both))
    yield from (tables.finished(table) for table in found if table.rows)


def _speedup_table(both: Comparison) -> Table:
    rows = [
        (
            pair.label,
            mine.setting.category or tables.ALL,
            *tables.setting_cells(mine.setting),
            interval(mine.decode),
            interval(other.decode),
            _verdict(mine.decode, other.decode),
            interval(mine.end_to_end),
            interval(other.end_to_end),
        )
        for pair, mine, other in both.speedups()
    ]
    # All categories together first: they are what most readers look for.
    rows.sort(key=lambda row: row[1] != tables.ALL)
    columns = ("arm|", "category|", *tables.SETTING)
    compared = ("decode, A", "decode, B", "verdict|", "end to end, A", "end to end, B")
    return Table("Speed-up over plain", tables.columns(*columns, *compared), tuple(rows))


def _load_table(both: Comparison) -> Table:
    return Table(
        "Throughput and latency, all categories",
        tables.columns(
            "arm|",
            *tables.SETTING,
            *(
                f"{label}, {name}"
                for label in ("tokens/s", "TTFT ms", "TPOT ms", "errors")
                for name in NAMES
            ),
        ),
        tuple(
            (
                pair.label,
                *tables.setting_cells(mine.setting),
                *(number(each.tokens_per_s, 1) for each in (mine, other)),
                *(milliseconds(each.ttft_median_s) for each in (mine, other)),
                *(milliseconds(each.tpot_median_s) for each in (mine, other)),
                *(str(each.errors) for each in (mine, other)),
            )
            for pair, mine, other in both.loads()
        ),
    )


def _acceptance_table(both: Comparison) -> Table:
    return Table(
        "Acceptance",
        tables.columns(
            "arm|",
            "category|",
            "temp.",
            "rate, A",
            "rate, B",
            "mean acceptance length, A",
            "mean acceptance length, B",
        ),
        tuple(
            (
                pair.label,
                mine.category or tables.ALL,
                f"{mine.temperature:g}",
                interval(mine.rate),
                interval(other.rate),
                number(mine.mean_length),
                number(other.mean_length),
            )
            for pair, mine, other in both.acceptances()
        ),
    )


def _differences(both: Comparison) -> Table:
    """What differs besides the figures: machine, versions, study file, stack, arms."""
    facts_a, facts_b = (_described(side.run) for side in (both.a, both.b))
    rows = tuple(_differing(facts_a, facts_b))
    same = len(facts_a.keys() & facts_b.keys()) - sum(NONE not in (a, b) for _, a, b in rows)
    more = len(rows) - MAX_DIFFERENCES
    return Table(
        "What differs between the runs",
        tables.columns("what|", "A|", "B|"),
        rows[:MAX_DIFFERENCES],
        f"{same} other facts are the same." + (f" {more} more differ." if more > 0 else ""),
    )


def _described(run: Run) -> dict[str, Any]:
    study = run.study
    return {
        "GPU class": study.gpu,
        "commit": study.commit or NONE,
        **{f"environment: {name}": value for name, value in study.environment.items()},
        **{f"study: {name}": value for name, value in _flat(study.spec)},
        **{f"stack: {name}": value for name, value in _flat(study.stack or {})},
        **{
            f"arm {arm.name}: {name}": value
            for arm in study.arms
            for name, value in (("engine", arm.engine), ("model", arm.model))
        },
    }


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Name and both values of what differs, of nested values the innermost."""
    flat_a, flat_b = dict(_flat(a)), dict(_flat(b))
    for name in dict.fromkeys((*flat_a, *flat_b)):
        ours, theirs = flat_a.get(name), flat_b.get(name)
        if ours != theirs:
            yield name, _cell(ours), _cell(theirs)


def _flat(data: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values; lists of plain values stay whole."""
    for key, value in data.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
            yield from _flat(dict(enumerate(value)), f"{name}.")  # type: ignore[arg-type]
        else:
            yield name, value


def _cell(value: Any) -> str:
    if value is None:
        return NONE
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    text = str(value)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"
