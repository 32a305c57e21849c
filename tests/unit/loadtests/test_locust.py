"""Locust as a process of its own, against a server whose answers are known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from serving.stack.environment import free_port
from serving.studies.records import Drafting, RequestRecord, read_requests

# Never imported here: locust patches the sockets of the process that imports it.
pytestmark = pytest.mark.skipif(find_spec("locust") is None, reason="locust is not installed")

ROOT = Path(__file__).parents[3]
DECODE = "loadtests/decode.py"
RAMP = f"{DECODE},loadtests/ramp.py"

Fake = Callable[..., str]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.txt"
    file.write_text("One question?\n\nAnother question?\n")
    return str(file)


def locust(folder: Path, *arguments: str, files: str = DECODE) -> subprocess.CompletedProcess[str]:
    """One headless run to its end; its statistics go to `folder`."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MOE_SERVING_API_KEY": "sk-test"}
    command = [sys.executable, "-m", "locust", "-f", files, "--headless", "--only-summary"]
    command += ["--json-file", str(folder / "statistics"), "--stop-timeout", "20", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=50, check=False
    )


def requests_of(folder: Path) -> list[RequestRecord]:
    return list(read_requests(folder))


def entries(folder: Path) -> dict[str, dict[str, int]]:
    """Locust's own statistics, by type."""
    file = folder / "statistics.json"
    return {entry["method"]: entry for entry in json.loads(file.read_text())}


def test_every_third_stream_cut_is_a_third_of_failures(
    fake: Fake, prompts: str, tmp_path: Path
) -> None:
    host = fake("--chunks", "3,1,2", "--cut-every", "3")
    run = locust(
        tmp_path, "--host", host, "-u", "3", "-r", "3", "--requests", "12",
        "--prompts", prompts, "--max-tokens", "12", "--record", str(tmp_path),
    )  # fmt: skip
    records = requests_of(tmp_path)
    assert Counter(record.outcome for record in records) == {"ok": 8, "cut": 4}
    counted = entries(tmp_path)["chat"]
    assert (counted["num_requests"], counted["num_failures"]) == (12, 4)
    assert entries(tmp_path)["TTFT ms"]["num_requests"] == 8  # whole answers only
    assert run.returncode == 1


def test_tokens_chunks_and_acceptance_are_exactly_those_that_were_sent(
    fake: Fake, prompts: str, tmp_path: Path
) -> None:
    host = fake("--chunks", "3,1,2", "--first-after", "0.2", "--gap", "0.1")
    run = locust(
        tmp_path, "--host", host, "-u", "2", "-r", "2", "--requests", "4",
        "--prompts", prompts, "--max-tokens", "12", "--record", str(tmp_path), "--arm", "mtp",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    records = requests_of(tmp_path)
    assert len(records) == 4
    drafting = Drafting(drafts=6, drafted=12, accepted=6, accepted_per_position=(4, 2))
    for record in records:
        assert (record.completion_tokens, record.chunks, record.drafting) == (12, 6, drafting)
        assert (record.arm, record.streams, record.category) == ("mtp", 2, "text")
        assert record.ttft_s is not None and record.duration_s is not None
        # The server's sleeps are the least that can pass: 0.2 s, then five times 0.1 s.
        assert record.ttft_s >= 0.2
        assert record.tpot_s == (record.duration_s - record.ttft_s) / 11
        assert record.duration_s >= 0.7
    assert set(entries(tmp_path)) == {"TTFT ms", "TPOT µs", "tokens/s", "chat"}
    assert "sk-test" not in run.stdout + run.stderr


def test_workers_send_their_records_to_the_master(fake: Fake, prompts: str, tmp_path: Path) -> None:
    port = str(free_port())
    run = locust(
        tmp_path, "--host", fake("--gap", "0.02"), "-u", "4", "-r", "4", "--requests", "8",
        "--prompts", prompts, "--max-tokens", "5", "--record", str(tmp_path),
        "--processes", "2", "--master-bind-port", port, "--master-port", port,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    records = requests_of(tmp_path)
    # Each worker stops after 8 of its own, or when the master has 8 of both.
    assert 8 <= len(records) <= 16
    assert {record.streams for record in records} == {4}
    sent = [record.replica for record in records]
    assert len(set(sent)) == len(sent)
    assert entries(tmp_path)["chat"]["num_requests"] == len(records)


def test_an_open_loop_waits_for_no_answer(fake: Fake, prompts: str, tmp_path: Path) -> None:
    # One user whose answers take 2 s each: 12 of them in turn would take longer than the test.
    run = locust(
        tmp_path, "--host", fake("--first-after", "2"), "-u", "1", "--rate", "50",
        "--requests", "12", "--prompts", prompts, "--max-tokens", "1", "--record", str(tmp_path),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    records = requests_of(tmp_path)
    assert [record.streams for record in records] == [0] * 12
    begun = [record.sent_at for record in records]
    assert max(begun) - min(begun) < 11 * 2


def test_a_ramp_runs_its_steps_and_ends(fake: Fake, prompts: str, tmp_path: Path) -> None:
    run = locust(
        tmp_path, "--host", fake("--gap", "0.02"), "--steps", "1,3", "--step-time", "1.5",
        "--prompts", prompts, "--max-tokens", "5", "--record", str(tmp_path), files=RAMP,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert {record.streams for record in requests_of(tmp_path)} == {1, 3}


def test_where_nothing_answers_the_cure_is_named(prompts: str, tmp_path: Path) -> None:
    host = f"http://127.0.0.1:{free_port()}"
    run = locust(tmp_path, "--host", host, "--prompts", prompts)
    assert (
        f"nothing answers at {host} (Connection refused); "
        "start a stack with `moe-serving up demo`, or name a server with --host"
    ) in run.stderr
    assert "Traceback" not in run.stderr
    assert run.returncode == 2


def test_a_refused_request_is_recorded_with_its_status(
    fake: Fake, prompts: str, tmp_path: Path
) -> None:
    run = locust(
        tmp_path, "--host", fake("2"), "-u", "1", "--requests", "3",
        "--prompts", prompts, "--record", str(tmp_path),
    )  # fmt: skip
    records = requests_of(tmp_path)
    assert [(record.outcome, record.status) for record in records] == [
        ("ok", None), ("ok", None), ("refused", 500),
    ]  # fmt: skip
    assert run.returncode == 1


def test_a_bad_option_is_named(tmp_path: Path) -> None:
    run = locust(tmp_path, "--rate", "-1")
    assert "found '-1'; write a number from 0 on" in run.stderr
