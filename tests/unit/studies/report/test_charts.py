from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from serving.studies.analysis import analyse
from serving.studies.records import Run
from serving.studies.report.charts import charts
from serving.studies.report.plots import MAX_ROWS, Chart, Line, Point, draw

MakeRun = Callable[..., Run]


def named(run: Run) -> dict[str, Chart]:
    return {chart.name: chart for chart in charts(analyse(run))}


def a_chart(**changes: Any) -> Chart:
    lines = (Line("plain", (Point(1, 1.0), Point(2, 1.5, 1.4, 1.6)), 0),)
    fields: dict[str, Any] = {
        "name": "a",
        "title": "A",
        "caption": "",
        "alt": "",
        "x_label": "n",
        "y_label": "speed-up",
        "lines": lines,
    }
    return Chart(**(fields | changes))


def test_draft_tokens_are_the_x_of_the_first_chart_and_streams_its_lines(make_run: MakeRun) -> None:
    chart = named(make_run(arms=(0, 1, 3), streams=(1, 8)))["speedup-by-n"]
    assert [line.label for line in chart.lines] == ["1 stream", "8 streams"]
    assert [point.x for point in chart.lines[0].points] == [1, 3]
    for point in chart.lines[0].points:
        assert point.low is not None
        assert point.high is not None
        assert point.low < point.y < point.high


def test_one_number_of_streams_gives_rows_of_arms_in_place_of_a_curve(make_run: MakeRun) -> None:
    found = named(make_run(arms=(0, 1, 2), streams=(4,)))
    assert "speedup-by-streams" not in found
    assert found["tpot"].rows == ("plain", "mtp-1", "mtp-2")
    assert "speedup-by-arm" not in found
    assert found["tpot"].title == "Time per output token (TPOT), 4 streams"


def test_one_arm_beside_plain_at_one_number_of_streams_is_a_row(make_run: MakeRun) -> None:
    found = named(make_run(arms=(0, 2), streams=(1,)))
    assert "speedup-by-n" not in found
    assert found["speedup-by-arm"].rows == ("mtp-2",)


def test_one_category_has_no_chart_by_category(make_run: MakeRun) -> None:
    run = make_run(arms=(0, 2))
    requests = [each for each in run.requests if each.category == "code"]
    found = named(Run(run.study, tuple(requests)))
    assert [name for name in found if "category" in name] == []
    assert "speedup-by-streams" in found


def test_many_numbers_of_streams_show_five_lines_the_first_and_the_last_among_them(
    make_run: MakeRun,
) -> None:
    streams = (1, 2, 3, 4, 6, 8, 12, 16)
    chart = named(make_run(arms=(0, 1, 2), streams=streams, prompts=2))["speedup-by-n"]
    labels = [line.label for line in chart.lines]
    assert len(labels) == 5
    assert (labels[0], labels[-1]) == ("1 stream", "16 streams")
    assert "3 more numbers of streams are in the table." in chart.caption


def test_output_lengths_have_a_chart_of_their_own(make_run: MakeRun) -> None:
    found = named(make_run(arms=(0, 2), streams=(1,), max_tokens=(8, 64, 256)))
    assert [point.x for point in found["speedup-by-length"].lines[0].points] == [8, 64, 256]


def test_depths_have_a_chart_of_their_own_in_the_order_of_their_size(make_run: MakeRun) -> None:
    run = make_run(arms=(0, 2), streams=(1,))
    depths = {"code": "code+64", "chat": "chat+64", "reasoning": "code+1024"}
    requests = [
        each.model_copy(update={"category": depths.get(each.category, "code+256")})
        for each in run.requests
    ]
    found = named(Run(run.study, tuple(requests)))
    assert [point.x for point in found["acceptance-by-depth"].lines[0].points] == [64, 256, 1024]
    assert found["acceptance-by-category"].rows == ("chat+64", "code+64", "code+256", "code+1024")


def test_two_arms_of_one_number_of_draft_tokens_are_not_laid_over_each_other(
    make_run: MakeRun,
) -> None:
    run = make_run(arms=(0, 1, 2))
    arms = [
        arm.model_copy(update={"draft_tokens": 2}) if arm.name == "mtp-1" else arm
        for arm in run.study.arms
    ]
    study = run.study.model_copy(update={"arms": tuple(arms)})
    found = named(Run(study, run.requests))
    assert "speedup-by-n" not in found
    assert [line.label for line in found["speedup-by-streams"].lines] == ["mtp-1", "mtp-2"]


def test_an_arm_looks_the_same_in_every_chart(make_run: MakeRun) -> None:
    styles: dict[str, set[int]] = {}
    for name, chart in named(make_run()).items():
        for line in chart.lines if name != "speedup-by-n" else ():
            styles.setdefault(line.label, set()).add(line.style)
    assert styles == {"plain": {0}, "mtp-1": {1}, "mtp-2": {2}, "mtp-3": {3}, "mtp-4": {4}}


def test_two_lines_differ_in_more_than_colour() -> None:
    lines = tuple(Line(f"arm {n}", (Point(1, n), Point(2, n)), n) for n in range(3))
    svg = draw(a_chart(lines=lines)).inline
    dashes = re.findall(r"stroke-dasharray: ([^;\"]+)", svg)
    assert len(set(dashes)) == 2
    markers = re.findall(r'<path id="(m[^"]+)" d="([^"]+)"', svg)
    assert len({path for _, path in markers}) >= 3


def test_a_drawing_inside_a_page_takes_its_colours_from_it() -> None:
    drawn = draw(a_chart())
    assert "var(--ink)" in drawn.inline
    assert re.findall(r"(?:fill|stroke): #", drawn.inline) == []
    assert "var(" not in drawn.standalone


def test_a_dollar_in_a_name_is_a_dollar_and_markup_is_text() -> None:
    lines = tuple(
        Line(label, (Point(1, 1.0), Point(2, 2.0)), 1) for label in ("$x^2$", "<script>&")
    )
    svg = draw(a_chart(lines=lines)).inline
    assert ">$x^2$<" in svg
    assert "&lt;script&gt;&amp;" in svg


def test_a_chart_of_hundreds_of_rows_stays_short() -> None:
    rows = tuple(f"category {number}" for number in range(500))
    line = Line("mtp-1", tuple(Point(number, 1.0) for number in range(500)), 1)
    svg = draw(a_chart(rows=rows, lines=(line,))).inline
    assert f"category {MAX_ROWS - 1}<" in svg
    assert f"category {MAX_ROWS}<" not in svg
