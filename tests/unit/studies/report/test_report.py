from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from serving.studies.analysis import analyse
from serving.studies.analysis.answer import answer
from serving.studies.records import RecordsError, Run, read_study, write_study
from serving.studies.report import write_comparison, write_report
from serving.studies.report.run_page import page_of


class Seen(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def files(folder: Path) -> dict[str, Path]:
    return {file.name: file for file in write_report(folder)}


@pytest.fixture(scope="module")
def html(files: dict[str, Path]) -> str:
    return files["report.html"].read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def comparison(folder: Path, other_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("compared") / "compare.html"
    return write_comparison(folder, other_folder, out).read_text(encoding="utf-8")


def test_a_report_is_html_markdown_csv_and_figures(folder: Path, files: dict[str, Path]) -> None:
    assert list(files) == [
        "report.html",
        "report.md",
        "summary.csv",
        "acceptance.csv",
        "requests.csv",
        "speedup-by-n.svg",
        "acceptance-by-place.svg",
        "speedup-by-streams.svg",
        "throughput.svg",
        "tpot.svg",
        "ttft.svg",
        "speedup-by-category.svg",
        "acceptance-by-category.svg",
    ]
    assert all(file.is_relative_to(folder) for file in files.values())


def test_the_answer_is_said_before_the_flags_and_these_before_every_figure(
    folder: Path, html: str
) -> None:
    text = Seen(html).text
    analysis = analyse(Run.read(folder))
    places = [
        text.index(answer(analysis)),
        text.index("1 of 337 requests to plain failed: 1 cut"),
        text.index("the run was disturbed: mtp-4's engine ended with code 1 in round 1"),
        text.index("Decode speed-up by number of draft tokens"),
        text.index("Speed-up over plain, all categories"),
        text.index("How it was measured"),
        text.index("How to reproduce it"),
    ]
    assert places == sorted(places)


def test_markdown_says_the_same_answer_and_flags(folder: Path, files: dict[str, Path]) -> None:
    text = files["report.md"].read_text(encoding="utf-8")
    assert f"**{answer(analyse(Run.read(folder)))}**" in text
    assert "- ⚠ **errors**: 1 of 337 requests to plain failed: 1 cut; " in text


def test_every_link_of_the_markdown_is_a_file(folder: Path, files: dict[str, Path]) -> None:
    links = re.findall(r"\]\(([^)]+)\)", files["report.md"].read_text(encoding="utf-8"))
    assert len(links) == 8
    assert all((folder / link).is_file() for link in links)


def test_every_markdown_row_has_as_many_cells_as_its_header(files: dict[str, Path]) -> None:
    width = 0
    for line in files["report.md"].read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            width = 0
            continue
        cells = len(re.findall(r"(?<!\\)\|", line))
        width = width or cells
        assert cells == width, line


@pytest.mark.parametrize("page", ["html", "comparison"])
def test_a_page_asks_nothing_of_a_network(page: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(page)
    loading = {"src", "href", "xlink:href", "srcset", "data", "action", "poster"}
    for tag, attributes in Seen(found).tags:
        assert tag not in {"script", "link", "iframe", "object", "embed", "base"}
        for name in loading & attributes.keys():
            assert (attributes[name] or "").startswith("#")
    assert re.findall(r"@import|url\((?!#)", found) == []


@pytest.mark.parametrize("page", ["html", "comparison"])
def test_names_from_a_run_are_text_and_never_markup(
    page: str, request: pytest.FixtureRequest
) -> None:
    found = request.getfixturevalue(page)
    assert "<b>json</b>" not in found
    assert "&lt;b&gt;json&lt;/b&gt;" in found


@pytest.mark.parametrize("page", ["html", "comparison"])
def test_every_figure_has_words_for_those_who_do_not_see_it(
    page: str, request: pytest.FixtureRequest
) -> None:
    tags = Seen(request.getfixturevalue(page)).tags
    told = [attributes["aria-label"] for _, attributes in tags if attributes.get("role") == "img"]
    assert len(told) == sum(tag == "svg" for tag, _ in tags) > 0
    assert all(text and re.search(r"\d", text) for text in told)


@pytest.mark.parametrize("page", ["html", "comparison"])
def test_no_two_elements_of_a_page_have_one_id(page: str, request: pytest.FixtureRequest) -> None:
    ids = re.findall(r'\sid="([^"]+)"', request.getfixturevalue(page))
    assert len(ids) == len(set(ids)) > 0


def test_every_colour_variable_of_a_figure_is_set_in_light_and_dark(html: str) -> None:
    style = html[: html.index("</style>")]
    for name in set(re.findall(r"var\((--[a-z]+)\)", html)):
        assert len(re.findall(rf"{name}: #", style)) >= 2, name


def test_the_same_run_gives_the_same_bytes(folder: Path, html: str, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert write_report(copy)[0].read_text(encoding="utf-8") == html


def test_a_report_replaces_the_figures_of_an_earlier_one(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    stale = copy / "figures" / "of-an-earlier-report.svg"
    stale.parent.mkdir(exist_ok=True)
    stale.write_text("<svg/>")
    write_report(copy)
    assert not stale.exists()


def test_a_page_is_no_larger_for_twenty_times_the_requests(folder: Path) -> None:
    run = Run.read(folder)
    many = replace(run, requests=run.requests * 20)
    page, larger = page_of(run), page_of(many)
    assert len(many.requests) > 20_000
    assert [len(each.rows) for each in larger.tables] == [len(each.rows) for each in page.tables]
    # Ticks differ with the figures; points do not.
    sizes = [sum(len(each.inline) for each in found.drawings) for found in (page, larger)]
    assert sizes[1] < 1.2 * sizes[0]


def test_the_summary_has_a_line_for_each_arm_and_setting(files: dict[str, Path]) -> None:
    with files["summary.csv"].open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    # Loads of 5 arms at 3 numbers of streams, and speed-ups of 4 arms in 4 categories there.
    assert len(rows) == 5 * 3 + 4 * 3 * 4
    plain = [row for row in rows if row["arm"] == "plain"]
    assert [row["streams"] for row in plain] == ["1", "4", "16"]
    assert all(row["decode_speedup"] == "" and float(row["tokens_per_s"]) > 0 for row in plain)
    fast = next(row for row in rows if row["arm"] == "mtp-2" and row["category"] == "all")
    low, value, high = (float(fast[f"decode_speedup{end}"]) for end in ("_low", "", "_high"))
    assert 1 < low < value < high
    assert fast["verdict"] == "faster"


def test_the_requests_stand_in_a_csv_without_their_texts(
    folder: Path, files: dict[str, Path]
) -> None:
    with files["requests.csv"].open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(Run.read(folder).requests)
    assert "text" not in rows[0]
    assert sum(row["outcome"] == "cut" for row in rows) == 5


def test_a_name_that_is_a_formula_to_a_spreadsheet_is_quoted(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    lines = copy.joinpath("requests.jsonl").read_text(encoding="utf-8")
    copy.joinpath("requests.jsonl").write_text(lines.replace('"chat"', '"=1+1"'), encoding="utf-8")
    write_report(copy)
    assert ",'=1+1," in copy.joinpath("summary.csv").read_text(encoding="utf-8")


def test_a_run_that_has_only_begun_has_a_report(folder: Path, tmp_path: Path) -> None:
    study = read_study(folder)
    write_study(tmp_path, study.model_copy(update={"ended_at": None, "events": ()}))
    html = write_report(tmp_path)[0].read_text(encoding="utf-8")
    assert "No speed-up can be told" in html
    assert "0 requests, 0 failed" in html
    assert "not finished" in html
    assert "<svg" not in html


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match=r"is .* a study's folder"):
        write_report(tmp_path)


def test_how_to_reproduce_names_commit_study_file_and_stack(html: str) -> None:
    text = Seen(html).text
    assert "git checkout 6cd48a4f0c1e2d3b4a59687f6e5d4c3b2a190807 && make setup" in text
    assert "moe-serving study run study.yaml --out n-sweep" in text
    assert "draft_tokens: - 0 - 1 - 2 - 3 - 4" in text
    assert "Stack file, as resolved" in text
    assert "570.133.07" in text


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ("all-at-once", "each round takes every arm in turn"),
        ("pairs", "One arm at a time is up beside plain"),
        ("one-by-one", "each between two blocks of plain"),
        ("live", "no two requests are a pair"),
    ],
)
def test_the_order_that_is_described_is_the_one_of_the_run(
    blocks: str, words: str, folder: Path
) -> None:
    run = Run.read(folder)
    study = run.study.model_copy(update={"spec": {**run.study.spec, "blocks": blocks}})
    order = page_of(replace(run, study=study)).method[0]
    assert order.term == "Order"
    assert words in order.text
    assert ("the same prompts" in order.text) == (blocks != "live")


def test_every_event_is_in_the_method_and_a_routine_one_no_flag(folder: Path) -> None:
    page = page_of(Run.read(folder))
    told = {each.term: each.text for each in page.method}
    assert told["Events"] == (
        "2027-01-15 08:01:00 UTC: mtp-4's engine ended with code 1 in round 1; "
        "2027-01-15 08:02:00 UTC: interrupted"
    )
    (flag,) = (each.text for each in page.flags if each.term == "events")
    assert flag == "the run was disturbed: mtp-4's engine ended with code 1 in round 1"


def test_a_dirty_checkout_is_told(folder: Path) -> None:
    run = Run.read(folder)
    study = run.study.model_copy(update={"commit": "6cd48a4f0c1e-dirty"})
    commands = page_of(replace(run, study=study)).commands
    assert "git checkout 6cd48a4f0c1e && make setup" in commands
    assert "# files differed from that commit when it ran" in commands


def test_greedy_answers_that_were_kept_have_a_table_and_a_paragraph(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(arms=(0, 1), streams=(1,), prompts=1, rounds=1)
    requests = []
    for each in run.requests:
        other = each.arm == "mtp-1" and "code" in each.prompt
        kept = {"token_ids": (5, 6, 8 if other else 7), "logprob_gaps": (3.0, 3.0, 0.1)}
        requests.append(each.model_copy(update=kept))
    page = page_of(Run(run.study, tuple(requests)))
    table = next(each for each in page.tables if each.title.startswith("Losslessness"))
    assert [row[0] for row in table.rows] == ["plain", "mtp-1"]
    assert table.rows[0][3] == "1.000 [0.510, 1.000]"
    drafting = table.rows[-1]
    assert drafting[:4] == ("mtp-1", "token", "4", "0.750 [0.301, 0.954]")
    assert drafting[4:] == ("1", "0", "0", "2")
    assert "Losslessness" in [each.term for each in page.method]


def test_energy_has_a_table_where_the_hardware_told_it(make_run: Callable[..., Run]) -> None:
    run = make_run(arms=(0, 1), streams=(1,))
    tokens = sum(each.completion_tokens or 0 for each in run.requests if each.arm == "mtp-1")
    study = run.study.model_copy(update={"energy_j": {"mtp-1": 0.25 * tokens}})
    table = next(
        each for each in page_of(Run(study, run.requests)).tables if each.title == "Energy"
    )
    assert table.rows == (("mtp-1", "0.250"),)


def test_a_comparison_says_what_the_same_variant_gains_in_both_runs(comparison: str) -> None:
    text = Seen(comparison).text
    assert re.search(
        r"At 1 stream, mtp-3 decodes \d\.\d\d× \[\d\.\d\d, \d\.\d\d\] as fast as plain on A and "
        r"\d\.\d\d× \[\d\.\d\d, \d\.\d\d\] on B: no difference; plain takes 20\.\d ms per token "
        r"on A and 12\.\d ms on B\.",
        text,
    )


def test_a_comparison_names_what_differs_and_only_that(comparison: str) -> None:
    start = comparison.index("What differs between the runs")
    table = comparison[start : comparison.index("</table>", start)]
    rows = re.findall(r'<th scope="row"[^>]*>([^<]*)<', table)
    assert rows == [
        "GPU class",
        "study: arms.draft_tokens",
        "stack: models.0.variants",
        "arm mtp-4: engine",
        "arm mtp-4: model",
    ]
    assert "rtx3090" in table
    assert "rtx4090" in table


def test_a_comparison_matches_arms_of_other_names_by_their_draft_tokens(
    folder: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    for name in ("study.json", "requests.jsonl"):
        file = other / name
        file.write_text(file.read_text(encoding="utf-8").replace("mtp-2", "llama-2"), "utf-8")
    out = write_comparison(folder, other, tmp_path / "compare.html")
    assert "mtp-2 / llama-2" in out.read_text(encoding="utf-8")


def test_two_runs_without_a_common_load_are_compared_with_a_word_on_it(
    folder: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    file = other / "requests.jsonl"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace('"max_tokens": 128', '"max_tokens": 64'), encoding="utf-8")
    html = write_comparison(folder, other, tmp_path / "compare.html").read_text(encoding="utf-8")
    assert "The two runs measured no variant under the same load" in html


def test_the_report_reads_the_run_without_ray_or_an_engine() -> None:
    program = (
        "import sys, serving.studies.report; "
        "sys.exit(bool({'ray', 'vllm', 'torch', 'matplotlib.pyplot'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[4]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    assert subprocess.run([sys.executable, "-c", program], env=environment).returncode == 0
