"""The load that comes and goes, against the tests' own server and a Serve that is told."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from serving.stack.runtime import HOME_VARIABLE
from serving.studies.records import RequestRecord, append_request, read_requests

Import = Callable[[str], ModuleType]


@pytest.fixture
def autoscaling(module: Import) -> ModuleType:
    return module("autoscaling")


def test_the_steps_say_how_many_streams_there_are_when(autoscaling: ModuleType) -> None:
    steps = autoscaling.steps_of("0:10,3:5")
    assert [autoscaling.streams_at(steps, at) for at in (0, 9.9, 10, 14.9, 15)] == [
        0,
        0,
        3,
        3,
        None,
    ]


@pytest.mark.parametrize("text", ["3", "3:0", "-1:5", "3:x", "1:5,"])
def test_steps_that_are_none_are_named(autoscaling: ModuleType, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write streams:seconds"):
        autoscaling.steps_of(text)


async def test_every_request_is_recorded_and_every_second_sampled(
    autoscaling: ModuleType, fake: Callable[..., str], tmp_path: Path
) -> None:
    url = f"{fake('2')}/v1"
    counted = iter([(0, 0), (0, 1), (1, 1), (1, 1), (1, 1), (1, 1)])
    steps = autoscaling.steps_of("0:1,2:2")
    await autoscaling.measure(url, "tiny", steps, 4, lambda: next(counted), tmp_path)
    samples = autoscaling.read_samples(tmp_path)
    assert [(s.running, s.wanted) for s in samples[:3]] == [(0, 0), (0, 1), (1, 1)]
    assert (samples[0].streams, samples[-1].streams) == (0, 2)
    records = list(read_requests(tmp_path))
    # The server answers two and then refuses; both are recorded.
    assert [record.outcome for record in records].count("ok") == 2
    assert {record.status for record in records if not record.ok} == {500}
    assert {(record.streams, record.max_tokens) for record in records} == {(2, 4)}


def recorded(folder: Path, autoscaling: ModuleType) -> None:
    lines = ["seconds,streams,running,wanted", "0.0,0,0,0", "1.0,1,0,1", "2.0,1,1,1", "3.0,0,0,0"]
    (folder / autoscaling.SAMPLES).write_text("\n".join(lines) + "\n")
    common = dict(cell="c", round=0, arm="m", streams=1, category="code", prompt="p")
    common |= dict(temperature=0, max_tokens=4, sent_at=100.0)
    ok = dict(outcome="ok", ttft_s=1.5, duration_s=2.0, completion_tokens=4)
    append_request(folder, RequestRecord.model_validate(common | ok))
    append_request(folder, RequestRecord.model_validate(common | dict(outcome="cut")))


def test_the_summary_names_each_number_of_replicas_and_what_failed(
    autoscaling: ModuleType, tmp_path: Path
) -> None:
    recorded(tmp_path, autoscaling)
    assert autoscaling.summary(tmp_path).splitlines() == [
        "replicas running: 0 -> 1 -> 0",
        "requests: 2, 1 failed",
        "to first text: median 1.50 s, most 1.5 s",
    ]


def test_the_picture_has_a_line_for_each_number(autoscaling: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    recorded(tmp_path, autoscaling)
    autoscaling.draw(tmp_path)
    svg = (tmp_path / autoscaling.PICTURE).read_text()
    for words in ("requests in flight", "replicas wanted", "replicas running", "s to first text"):
        assert words in svg


def test_a_request_is_placed_where_the_streams_began(
    autoscaling: ModuleType, tmp_path: Path
) -> None:
    recorded(tmp_path, autoscaling)
    assert autoscaling._waits(list(read_requests(tmp_path)), 1.0) == [(1.0, 1.5)]


def test_without_a_stack_the_way_to_start_one_is_told(
    autoscaling: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    with pytest.raises(SystemExit, match="start one with `moe-serving up autoscaled --detach`"):
        autoscaling.connect("tiny-moe")
