"""What is in the files after any end of a process, and that nothing is there twice."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.teams.errors import StoreError
from serving.teams.spool import CUT_STATUS, Spool, UsageRecord

ROOT = Path(__file__).parents[3]
# Begins and ends requests for ever, and says of each what has returned.
WRITER = """
import sys
from pathlib import Path
from serving.teams.spool import Spool, UsageRecord
spool = Spool(Path(sys.argv[1]), segment_bytes=4000)
for number in range(10**9):
    record = UsageRecord(spool.new_id(), f"r{number}", 1.0, "search", "k", "m", "plain")
    spool.append(record, ended=False)
    print("open", record.id, flush=True)
    if number % 3:
        spool.append(record._replace(output_tokens=number, complete=True), ended=True)
        print("ended", record.id, number, flush=True)
"""


def record_of(spool: Spool, **values: object) -> UsageRecord:
    fields = {"request_id": "r", "at": 1.0, "team": "search", "key_id": "k"}
    return UsageRecord(**{"id": spool.new_id(), **fields, "model": "m", "variant": "v", **values})  # type: ignore[arg-type]


def taken(spool: Spool) -> list[UsageRecord]:
    """All that is pending, let go of."""
    found: list[UsageRecord] = []
    with closing(spool.pending()) as segments:
        for segment in segments:
            found += segment.records
            spool.done(segment)
    return found


def files(folder: Path, ending: str = "*") -> list[Path]:
    return sorted(folder.glob(ending))


def test_what_has_ended_is_pending_until_it_is_done(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    record = record_of(spool)
    spool.append(record, ended=False)
    spool.append(record._replace(output_tokens=7), ended=True)
    spool.seal()
    for _ in range(2):
        assert [each.records for each in spool.pending()] == [(record._replace(output_tokens=7),)]
    taken(spool)
    assert taken(spool) == []
    spool.close()
    assert files(tmp_path, "*.jsonl") == []


def test_a_running_request_outlives_the_files_that_it_began_in(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    running = record_of(spool, output_tokens=3, status=200)
    spool.append(running, ended=False)
    for _ in range(3):
        spool.append(record_of(spool), ended=True)
        spool.seal()
        assert len(taken(spool)) == 1
    spool.close()
    heir = Spool(tmp_path)
    assert taken(heir) == [running]
    heir.close()


def test_files_of_a_living_process_are_left_alone(tmp_path: Path) -> None:
    first, second = Spool(tmp_path), Spool(tmp_path)
    first.append(record_of(first), ended=True)
    first.seal()
    assert taken(second) == []
    assert len(taken(first)) == 1
    first.close()
    second.close()


def test_a_request_that_was_not_answered_is_a_cut_one(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    record = record_of(spool)
    spool.append(record, ended=False)
    spool.close()
    heir = Spool(tmp_path)
    assert taken(heir) == [record._replace(status=CUT_STATUS, complete=False)]
    heir.close()
    assert [path.suffix for path in files(tmp_path)] == [".lock"]


def test_what_was_left_behind_comes_again_until_it_is_done(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append(record_of(spool), ended=True)
    spool.close()
    heir = Spool(tmp_path)
    with closing(heir.pending()) as segments:
        first = next(segments)
    assert [each.records for each in heir.pending()] == [first.records]
    assert taken(heir) == list(first.records)
    assert [path.name for path in files(tmp_path, "*.lock")] == [f"{heir.process}.lock"]
    heir.close()


# Files take as long as the disk does.
@settings(deadline=None, max_examples=30)
@given(keep=st.integers(min_value=0, max_value=400))
def test_a_torn_last_line_costs_only_itself(keep: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spool = Spool(Path(folder))
        whole = [record_of(spool), record_of(spool)]
        for record in whole:
            spool.append(record, ended=True)
        [path] = files(Path(folder), "*.jsonl")
        before = path.stat().st_size
        spool.append(record_of(spool), ended=True)
        spool.close()
        os.truncate(path, min(before + keep, path.stat().st_size - 1))
        heir = Spool(Path(folder))
        assert taken(heir) == whole
        heir.close()


def test_a_damaged_line_is_kept_aside_and_costs_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(tmp_path)
    records = [record_of(spool, request_id=f"r{number}") for number in range(3)]
    for record in records:
        spool.append(record, ended=True)
    spool.close()
    [path] = files(tmp_path, "*.jsonl")
    path.write_bytes(path.read_bytes().replace(b'"r1"', b'"rX"'))
    heir = Spool(tmp_path)
    assert len(list(heir.pending())) == 1
    assert taken(heir) == [records[0], records[2]]
    heir.close()
    [aside] = files(tmp_path, "*.damaged")
    assert b'"rX"' in aside.read_bytes()
    assert caplog.text.count("1 records cannot be read") == 1


def test_files_stay_small_where_nobody_stores(tmp_path: Path) -> None:
    spool = Spool(tmp_path, segment_bytes=2000)
    records = [record_of(spool) for _ in range(50)]
    for record in records:
        spool.append(record, ended=True)
    assert max(path.stat().st_size for path in files(tmp_path, "*.jsonl")) < 3000
    spool.seal()
    assert taken(spool) == records
    spool.close()


def test_a_full_disk_loses_nothing_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(tmp_path)
    records = [record_of(spool) for _ in range(4)]
    real, room = os.write, [100]

    def write(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        fits = min(room[0], len(data))
        room[0] -= fits
        return real(file, memoryview(bytes(data))[:fits])

    with monkeypatch.context() as full:
        full.setattr(os, "write", write)
        for record in records:
            spool.append(record, ended=True)
        spool.seal()
        assert taken(spool) == []
    assert caplog.text.count("waits in memory") == 1
    spool.seal()
    assert taken(spool) == records
    spool.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file/spool: usage cannot be kept there"):
        Spool(tmp_path / "file" / "spool")


def test_a_killed_process_loses_no_record_whose_append_returned(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said: list[list[str]] = []
    for writer in writers:
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(300)]
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        lines += writer.stdout.readlines()
        writer.stdout.close()
        # What the kill cut off was not said.
        said += [line.split() for line in lines if line.endswith("\n")]
    ended = {words[1]: int(words[2]) for words in said if words[0] == "ended"}
    begun = {words[1] for words in said}
    heir = Spool(tmp_path)
    found = taken(heir)
    heir.close()
    by_id = {record.id: record for record in found}
    assert len(by_id) == len(found)
    assert begun <= by_id.keys() and len(by_id.keys() - begun) <= len(writers)
    assert {name: by_id[name].output_tokens for name in ended} == ended
    assert all(by_id[name].complete for name in ended)
    assert sum(not record.complete for record in found) >= len(begun) // 4
