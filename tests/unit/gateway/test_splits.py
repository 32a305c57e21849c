"""Requests of an A/B study, recorded in the form that `moe-serving study report` reads."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest

from serving.engines.keys import Send
from serving.gateway import splits
from serving.gateway.errors import no_capacity
from serving.router.settings import Routing, Split
from serving.studies import records
from serving.studies.analysis import analyse
from serving.studies.records import RequestRecord, Run
from serving.studies.report import write_report
from tests.unit.gateway.harness import COMPLETIONS, MODEL, Stack, events, start, until, whole, write

STUDY = "live-1"
ROUTING = Routing(split=Split(study=STUDY, arms=("mtp", "plain"), share=1.0))
DRAFTED = {"num_spec_steps": 4, "num_draft_tokens": 8, "num_accepted_draft_tokens": 5}
REPLY = json.dumps(
    {
        "choices": [{"text": "the answer"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 9},
        "metrics": {"speculative_decoding": DRAFTED},
    }
).encode()


@pytest.fixture
def folder(stack: Stack, tmp_path: Path) -> Path:
    """The folder of the study that every request takes part in."""
    stack.route(ROUTING, home=tmp_path)
    return tmp_path / "splits" / STUDY


def lines(folder: Path) -> int:
    return (folder / records.REQUESTS).read_text().count("\n")


async def recorded(stack: Stack, folder: Path, count: int = 1) -> list[RequestRecord]:
    """The records, all written."""
    if count:
        await until(lambda: (folder / records.REQUESTS).exists() and lines(folder) == count)
    stack.app.close()
    found = list(records.read_requests(folder))
    assert len(found) == count
    return found


def test_the_files_have_the_names_that_studies_look_for() -> None:
    assert (splits.REQUESTS, splits.STUDY) == (records.REQUESTS, records.STUDY)


async def test_a_whole_reply_is_recorded_with_what_the_engine_tells(
    stack: Stack, folder: Path
) -> None:
    stack.engine.behave = whole(REPLY)
    headers = {"x-session-id": "s-1", "x-request-id": "r-1", "x-moe-serving-category": "code"}
    body = {"model": "chat", "prompt": "a secret", "max_tokens": 9, "temperature": 0}
    response = await stack.client.post(COMPLETIONS, json=body, headers=headers)
    assert response.headers["x-moe-serving-route"] == "split"
    (record,) = await recorded(stack, folder)
    arm = response.headers["x-moe-serving-variant"]
    assert (record.arm, record.variant, record.replica) == (arm, arm, "replica-1")
    assert record.draft_tokens == {"mtp": 2, "plain": 0}[arm]
    assert (record.outcome, record.prompt, record.category) == ("ok", "r-1", "code")
    assert (record.max_tokens, record.temperature, record.streams) == (9, 0.0, 0)
    assert (record.prompt_tokens, record.completion_tokens) == (3, 9)
    assert record.drafting == records.Drafting(drafts=4, drafted=8, accepted=5)
    assert record.ttft_s is None
    assert record.duration_s is not None
    assert math.isfinite(record.sent_at)
    text = "".join(file.read_text() for file in folder.iterdir())
    assert "secret" not in text and "answer" not in text


async def test_of_a_stream_the_first_part_is_timed_too(stack: Stack, folder: Path) -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5}}\n\n'
    stack.engine.behave = events(b'data: {"a":1}\n\n', usage, b"data: [DONE]\n\n")
    await stack.ask(stream=True)
    (record,) = await recorded(stack, folder)
    assert record.ttft_s is not None and record.duration_s is not None
    assert 0 < record.ttft_s <= record.duration_s
    assert (record.completion_tokens, record.drafting) == (5, None)


async def test_what_the_engine_does_not_tell_is_left_out(stack: Stack, folder: Path) -> None:
    stack.engine.behave = events(b'data: {"a":1}\n\n', b"data: [DONE]\n\n")
    response = await stack.client.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": [], "stream": True}
    )
    assert response.content == b'data: {"a":1}\n\ndata: [DONE]\n\n'
    (record,) = await recorded(stack, folder)
    assert (record.completion_tokens, record.prompt_tokens) == (None, None)
    # Neither was asked for: the variant's context is the limit.
    assert (record.max_tokens, record.temperature) == (4096, 1.0)


async def test_refusals_cuts_and_clients_that_leave_are_recorded_as_such(
    stack: Stack, folder: Path
) -> None:
    stack.engine.behave = whole(b'{"error": {"message": "no"}}', status=400)
    await stack.ask()
    stack.engine.behave = events(b'data: {"a":1}\n\n', then=ConnectionError())
    await stack.ask()
    stack.pool.failure = no_capacity("m", 1)
    await stack.ask()
    stack.pool.failure = None
    stack.pool.free.clear()
    stack.pool.asked.clear()
    leaving = asyncio.create_task(stack.ask())
    await stack.pool.asked.wait()
    leaving.cancel()
    found = await recorded(stack, folder, 4)
    assert [(each.outcome, each.status) for each in found] == [
        ("refused", 400),
        ("cut", None),
        ("refused", 429),
        ("cut", None),
    ]
    assert found[3].error == "the client went away"


async def test_a_stream_that_runs_out_of_time_is_cut_and_not_refused(
    stack: Stack, folder: Path
) -> None:
    stack.route(ROUTING, home=folder.parent.parent, request_timeout_s=1.5)

    async def behave(send: Send) -> None:
        await start(send, "text/event-stream")
        await write(send, b"data: 1\n\n")
        await asyncio.Event().wait()

    stack.engine.behave = behave
    await stack.ask(stream=True)
    (record,) = await recorded(stack, folder)
    assert (record.outcome, record.error) == ("cut", "the reply was not finished (504)")


@pytest.mark.parametrize(
    ("model", "path"), [("tiny-moe@mtp", COMPLETIONS), ("tiny-moe", "/tokenize")]
)
async def test_who_names_a_variant_and_what_generates_nothing_takes_no_part(
    stack: Stack, folder: Path, model: str, path: str
) -> None:
    await stack.ask(path, model=model)
    await recorded(stack, folder, 0)


async def test_the_report_of_a_study_reads_the_folder(stack: Stack, folder: Path) -> None:
    stack.engine.behave = whole(REPLY)
    for session in range(12):
        headers = {"x-session-id": str(session)}
        body = {"model": MODEL, "prompt": "a", "max_tokens": 9}
        await stack.client.post(COMPLETIONS, json=body, headers=headers)
    await recorded(stack, folder, 12)
    run = Run.read(folder)
    assert [arm.name for arm in run.study.arms] == ["mtp", "plain"]
    assert (run.study.plain, run.study.gpu, run.study.id) == ("plain", "cpu", STUDY)
    analysis = await asyncio.to_thread(analyse, run)
    assert {load.arm for load in analysis.loads} == {"mtp", "plain"}
    assert sum(load.requests for load in analysis.loads) == 12
    files = await asyncio.to_thread(write_report, folder)
    assert "live-1" in files[0].read_text(encoding="utf-8")


async def test_a_study_that_is_taken_up_again_keeps_its_beginning(
    stack: Stack, folder: Path
) -> None:
    folder.mkdir(parents=True)
    (folder / records.STUDY).write_text('{"started_at": 12.5}')
    await stack.ask()
    await recorded(stack, folder)
    assert records.read_study(folder).started_at == 12.5


async def test_a_folder_that_cannot_be_written_costs_the_client_nothing(
    stack: Stack, tmp_path: Path
) -> None:
    (tmp_path / "splits").write_text("")
    stack.route(ROUTING, home=tmp_path)
    assert (await stack.ask()).status_code == 200
    stack.app.close()
    counted = 'moe_serving_split_records_total{outcome="failed",study="live-1"} 1.0'
    assert counted in await stack.metrics()


async def test_records_that_nobody_writes_are_dropped_and_counted(
    stack: Stack, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "MOST_WAITING", 0)
    assert (await stack.ask()).status_code == 200
    counted = 'moe_serving_split_records_total{outcome="dropped",study="live-1"} 1.0'
    assert counted in await stack.metrics()
    assert not folder.exists()
