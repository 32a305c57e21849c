"""Carrying a study out against fake servers: nothing lost, nothing twice, failures kept."""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from serving.studies import run as run_module
from serving.studies.closed_loop import Material
from serving.studies.lossless import compare_greedy
from serving.studies.overhead.servers import Server
from serving.studies.prompts import Prompt
from serving.studies.records import REQUESTS, STUDY, RequestRecord, Run, append_request
from serving.studies.run import Outcome, StudyError, run_study
from serving.studies.schedule import Cell, Point, questions_of
from serving.studies.spec import StudySpec

Start = Callable[..., Server]
PROMPTS = 4
# Three rounds of two arms, and plain's first round again.
PLANNED = (3 * 2 + 1) * PROMPTS


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"id": f"p{n}", "category": "code", "text": f"def f{n}():", "max_tokens": 4}
        for n in range(PROMPTS)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def study(prompts: Path, plain: Server, drafting: Server, **fields: Any) -> StudySpec:
    def endpoint(server: Server, n: int) -> dict[str, Any]:
        return {"url": server.url, "model": "tiny", "draft_tokens": n}

    values: dict[str, Any] = {
        "schema": 1,
        "name": "lab",
        "question": "Is it faster?",
        "gpu": "cpu",
        "arms": {"endpoints": {"plain": endpoint(plain, 0), "mtp": endpoint(drafting, 2)}},
        "prompts": str(prompts),
        "streams": [2],
        "max_tokens": [4],
        "repetitions": 3,
        "warm_up": {"requests_per_stream": 1},
    }
    return StudySpec.model_validate(values | fields)


def carried_out(spec: StudySpec, folder: Path, **options: Any) -> Outcome:
    return run_study(spec, folder, Console(file=io.StringIO()), **options)


def asked(found: Run) -> Counter[tuple[str, str]]:
    return Counter((each.cell, each.prompt) for each in found.requests)


def test_a_study_records_every_request_once_and_describes_itself(
    tmp_path: Path, prompts: Path, start: Start
) -> None:
    spec = study(prompts, start("plain"), start("mtp", "--chunks", "3,1"))
    assert carried_out(spec, tmp_path / "run") == Outcome(PLANNED, PLANNED, failed=0)
    found = Run.read(tmp_path / "run")
    assert len(asked(found)) == PLANNED
    assert set(asked(found).values()) == {1}
    assert all(each.ok and each.completion_tokens == 4 for each in found.requests)
    drafting = [each for each in found.requests if each.arm == "mtp"]
    assert all(each.drafting and each.draft_tokens == 2 for each in drafting)
    assert [arm.name for arm in found.study.arms] == ["plain", "mtp"]
    assert found.study.spec["blocks"] == "all-at-once"
    assert found.study.environment["cores"].isdigit()
    assert found.study.ended_at is not None
    assert found.study.events == ()


def test_the_records_are_interleaved_and_paired_by_prompt(
    tmp_path: Path, prompts: Path, start: Start
) -> None:
    carried_out(study(prompts, start("plain"), start("mtp")), tmp_path / "run")
    requests = Run.read(tmp_path / "run").requests
    cells = list(dict.fromkeys((each.round, each.arm, each.again) for each in requests))
    assert cells == [
        (0, "plain", False),
        (0, "mtp", False),
        (1, "mtp", False),
        (1, "plain", False),
        (2, "plain", False),
        (2, "mtp", False),
        (0, "plain", True),
    ]
    by_arm = {
        arm: {(each.round, each.prompt) for each in requests if each.arm == arm}
        for arm in ("plain", "mtp")
    }
    assert by_arm["mtp"] == by_arm["plain"]


@pytest.mark.parametrize("after", [1, 9, 20])
def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(
    tmp_path: Path, prompts: Path, start: Start, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    spec, saved = study(prompts, start("plain"), start("mtp")), 0

    def save(folder: Path, record: RequestRecord) -> None:
        nonlocal saved
        append_request(folder, record)
        saved += 1
        if saved == after:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(run_module, "append_request", save)
    first = carried_out(spec, tmp_path / "run")
    assert first.interrupted
    assert after <= first.recorded < PLANNED
    assert Run.read(tmp_path / "run").study.ended_at is None
    assert carried_out(spec, tmp_path / "run") == Outcome(PLANNED, PLANNED, failed=0)
    found = Run.read(tmp_path / "run")
    assert len(asked(found)) == PLANNED
    assert set(asked(found).values()) == {1}
    assert [(event.kind, event.text) for event in found.study.events] == [
        ("interrupted", "interrupted"),
        ("resumed", f"taken up again after {first.recorded} of {PLANNED} requests"),
    ]


def test_what_plain_is_asked_again_shows_whether_it_repeats_itself(
    tmp_path: Path, prompts: Path, start: Start
) -> None:
    carried_out(study(prompts, start("plain"), start("mtp"), keep_texts=True), tmp_path / "run")
    agreements = {each.arm: each for each in compare_greedy(Run.read(tmp_path / "run"))}
    assert (agreements["plain"].compared, agreements["mtp"].compared) == (PROMPTS, 3 * PROMPTS)
    assert agreements["plain"].identical == PROMPTS


def test_a_request_whose_line_was_cut_off_is_asked_again(
    tmp_path: Path, prompts: Path, start: Start
) -> None:
    spec, folder = study(prompts, start("plain"), start("mtp")), tmp_path / "run"
    carried_out(spec, folder)
    file = folder / REQUESTS
    file.write_text(file.read_text()[:-20])
    assert carried_out(spec, folder).recorded == PLANNED
    assert set(asked(Run.read(folder)).values()) == {1}


def test_a_finished_study_sends_nothing_more(tmp_path: Path, prompts: Path, start: Start) -> None:
    plain = start("plain")
    spec = study(prompts, plain, start("mtp"))
    carried_out(spec, tmp_path / "run")
    plain.stop()
    assert carried_out(spec, tmp_path / "run") == Outcome(PLANNED, PLANNED, failed=0)


def test_a_server_that_goes_away_is_recorded_and_the_rest_goes_on(
    tmp_path: Path, prompts: Path, start: Start
) -> None:
    # Two to warm up, and then seven of the twelve.
    spec = study(prompts, start("plain"), start("mtp", "9"))
    outcome = carried_out(spec, tmp_path / "run", back_within_s=0)
    found = Run.read(tmp_path / "run")
    by_arm = {arm: [each for each in found.requests if each.arm == arm] for arm in ("plain", "mtp")}
    assert len(by_arm["plain"]) == 4 * PROMPTS
    assert all(each.ok for each in by_arm["plain"])
    assert [each.ok for each in by_arm["mtp"]].count(True) == 7
    failed = [each for each in by_arm["mtp"] if not each.ok]
    assert {(each.outcome, each.status) for each in failed} == {("refused", 500)}
    assert outcome.failed == len(failed) <= 2
    assert [(event.kind, event.text) for event in found.study.events] == [
        ("engine_lost", "mtp does not answer: out of order (HTTP 500)"),
        ("arm_left_out", "mtp is left out since it was not back within 0 s"),
    ]
    assert found.study.ended_at is None


def test_a_server_that_is_not_there_costs_only_its_own_arm(
    tmp_path: Path, prompts: Path, start: Start
) -> None:
    gone = start("mtp")
    spec = study(prompts, start("plain"), gone)
    gone.stop()
    outcome = carried_out(spec, tmp_path / "run", back_within_s=0)
    assert outcome == Outcome(4 * PROMPTS, PLANNED, failed=0)
    assert {each.arm for each in Run.read(tmp_path / "run").requests} == {"plain"}


def test_cut_streams_are_failures_and_an_arm_with_too_many_is_left_out(
    tmp_path: Path, prompts: Path, start: Start
) -> None:
    spec = study(
        prompts,
        start("plain"),
        start("mtp", "--cut-every", "3"),
        streams=[1],
        stop={"max_errors": 2},
    )
    carried_out(spec, tmp_path / "run")
    found = Run.read(tmp_path / "run")
    cut = [each for each in found.requests if not each.ok]
    assert [(each.arm, each.outcome) for each in cut] == [("mtp", "cut")] * 2
    assert found.study.events[-1].text == "mtp is left out after 2 failed requests"
    assert sum(each.arm == "plain" for each in found.requests) == 4 * PROMPTS


def test_a_run_that_is_out_of_time_stops_between_cells_and_can_go_on(
    tmp_path: Path, prompts: Path, start: Start
) -> None:
    spec = study(prompts, start("plain"), start("mtp"), stop={"max_minutes": 1e-9})
    assert carried_out(spec, tmp_path / "run").recorded == 0
    longer = spec.model_copy(update={"stop": spec.stop.model_copy(update={"max_minutes": 5.0})})
    assert carried_out(longer, tmp_path / "run").recorded == PLANNED


def test_the_folder_of_another_study_is_refused(
    tmp_path: Path, prompts: Path, start: Start
) -> None:
    spec, folder = study(prompts, start("plain"), start("mtp")), tmp_path / "run"
    carried_out(spec, folder)
    before = (folder / REQUESTS).read_bytes(), (folder / STUDY).read_bytes()
    other = spec.model_copy(update={"streams": (1, 2), "temperature": 0.7})
    with pytest.raises(StudyError) as caught:
        carried_out(other, folder)
    assert str(caught.value) == (
        f"{folder} holds a run of another study (lab): streams was [2], now [1, 2]; "
        "temperature was 0.0, now 0.7; "
        "give another folder, or the study file it was begun with"
    )
    assert ((folder / REQUESTS).read_bytes(), (folder / STUDY).read_bytes()) == before


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path, prompts: Path, start: Start) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with (folder / run_module.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StudyError, match="another study run is writing into"):
            carried_out(study(prompts, start("plain"), start("mtp")), folder)


def test_a_context_that_is_too_short_is_refused_before_anything_is_sent(
    tmp_path: Path, prompts: Path, start: Start
) -> None:
    (tmp_path / "short.txt").write_text("x" * 100)
    context = {"tokens": [64], "text": tmp_path / "short.txt"}
    spec = study(prompts, start("plain"), start("mtp"), context=context)
    with pytest.raises(StudyError, match=r"context.text: has 100 characters, but the deepest"):
        carried_out(spec, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_key_that_is_not_set_is_refused_before_anything_is_sent(
    tmp_path: Path, prompts: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LAB_KEY", raising=False)
    endpoint = {"url": start("plain").url, "model": "tiny", "api_key_env": "LAB_KEY"}
    arms = {"endpoints": {"plain": endpoint}}
    spec = study(prompts, start("a"), start("b"), arms=arms)
    with pytest.raises(StudyError) as caught:
        carried_out(spec, tmp_path / "run")
    assert str(caught.value) == (
        "arms.endpoints.plain.api_key_env: LAB_KEY is not set; export it, "
        "or remove the line where the server needs no key"
    )


def test_arms_get_the_same_text_and_rounds_another(prompts: Path) -> None:
    spec = StudySpec.model_validate(
        {
            "schema": 1,
            "name": "lab",
            "question": "Is it faster?",
            "stack": "demo",
            "arms": {"draft_tokens": [0, 1]},
            "context": {"tokens": [8], "characters_per_token": 4},
            "streams": [1],
            "max_tokens": [4],
            "repetitions": 2,
        }
    )
    prompt = Prompt("p", "code", (), 4, text="def f():")
    material = Material(spec, {"p": prompt}, salt_seed=1, context="0123456789" * 10)
    point = Point("code", 1, 4, 8)
    texts = []
    for number, arm, again in [(0, "plain", False), (0, "mtp-1", False), (0, "plain", True),
                               (1, "plain", False)]:  # fmt: skip
        cell = Cell(number, arm, point, again)
        (question,) = questions_of(cell, ["p"], spec)
        texts.append(material.prompt(cell, question).text or "")
    assert texts[0] == texts[1] == texts[2] != texts[3]
    salt, context, _, question_text = texts[0].split("\n")
    assert salt.startswith("# ")
    assert len(context) == 32
    assert question_text == "def f():"
