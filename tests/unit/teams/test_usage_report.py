"""Sums on both databases, and what the command prints of them."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from serving.teams.admin_operations import Report
from serving.teams.admin_values import By
from serving.teams.database import DATABASE_VARIABLE, Database, database_url, open_database
from serving.teams.errors import TeamsError
from serving.teams.ledger import SqlUsageStore
from serving.teams.spool import UsageRecord
from serving.teams.usage_report import Form, UsageReport, parse_since, show_usage

DAY = 86_400.0
MIDNIGHT = datetime(2026, 1, 31, tzinfo=UTC).timestamp()


def record(name: str, at: float, team: str = "search", **values: object) -> UsageRecord:
    fields = {"request_id": name, "key_id": "key1", "model": "qwen", "variant": "mtp"}
    counts = {"prompt_tokens": 10, "cached_tokens": 4, "output_tokens": 3}
    return UsageRecord(**{"id": name, "at": at, "team": team, **fields, **counts, **values})  # type: ignore[arg-type]


RECORDS = [
    record("a", MIDNIGHT - 0.25),
    record("b", MIDNIGHT, draft_tokens=6, accepted_tokens=5),
    record("c", MIDNIGHT + DAY - 0.25, key_id="key2", model="small"),
    record("d", MIDNIGHT + 1, team="ads"),
]


@pytest.fixture
def report(database: Database) -> UsageReport:
    SqlUsageStore(database).write(RECORDS)
    return UsageReport(database)


def found(report: Report, by: By = "day", **asked: object) -> list[tuple[str, str, int]]:
    wanted = {"team": None, "since": None, "until": None, "models": None, **asked}
    return [(row.team, row.group, row.requests) for row in report(by=by, **wanted)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("by", "sums"),
    [
        (
            "day",
            [("ads", "2026-01-31", 1), ("search", "2026-01-30", 1), ("search", "2026-01-31", 2)],
        ),
        ("model", [("ads", "qwen", 1), ("search", "qwen", 2), ("search", "small", 1)]),
        ("key", [("ads", "key1", 1), ("search", "key1", 2), ("search", "key2", 1)]),
    ],
)
def test_requests_are_added_up_by(
    report: UsageReport, by: By, sums: list[tuple[str, str, int]]
) -> None:
    assert found(report, by) == sums


def test_sums_are_of_what_was_asked_for_only(report: UsageReport) -> None:
    assert found(report, team="ads") == [("ads", "2026-01-31", 1)]
    assert found(report, "model", since=MIDNIGHT + 1) == [
        ("ads", "qwen", 1),
        ("search", "small", 1),
    ]
    assert found(report, until=MIDNIGHT) == [("search", "2026-01-30", 1)]
    assert found(report, "model", models={"small"}) == [("search", "small", 1)]
    assert found(report, models=set()) == []


def test_counts_are_summed_and_what_nobody_told_is_none(report: UsageReport) -> None:
    rows = {row.group: row for row in report(team="search", by="model")}
    qwen = rows["qwen"]
    assert (qwen.prompt_tokens, qwen.cached_tokens, qwen.output_tokens) == (20, 8, 6)
    assert (qwen.draft_tokens, qwen.accepted_tokens, qwen.cost) == (6, 5, None)
    assert rows["small"].draft_tokens is None


def test_an_empty_ledger_has_no_sums(database: Database) -> None:
    assert list(UsageReport(database)()) == []


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-01-31", MIDNIGHT),
        ("2026-01-31T12:00", MIDNIGHT + DAY / 2),
        ("2026-01-31T12:00:00Z", MIDNIGHT + DAY / 2),
        ("2026-01-31T12:00+12:00", MIDNIGHT),
        ("7d", 10 * DAY - 7 * DAY),
    ],
)
def test_since_is_a_day_a_time_or_how_long_ago(text: str, moment: float) -> None:
    assert parse_since(text, now=10 * DAY) == moment


@pytest.mark.parametrize("text", ["yesterday", "2026-13-01", "", "0d", "7"])
def test_a_since_that_is_none_is_refused_with_its_name(text: str) -> None:
    with pytest.raises(TeamsError, match=f"--since: found '{text}'"):
        parse_since(text, now=0)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder whose database has the records."""
    monkeypatch.delenv(DATABASE_VARIABLE, raising=False)
    database = open_database(database_url(tmp_path))
    database.prepare()
    SqlUsageStore(database).write(RECORDS)
    database.close()
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], home: Path, form: Form, by: By = "day") -> str:
    show_usage(home, team="search", by=by, since="2026-01-31", form=form)
    return capsys.readouterr().out


def test_json_and_csv_hold_the_same(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    [row] = json.loads(printed(capsys, home, "json"))
    assert (row["team"], row["day"], row["requests"], row["cost"]) == (
        "search",
        "2026-01-31",
        2,
        None,
    )
    [same] = csv.DictReader(io.StringIO(printed(capsys, home, "csv")))
    assert same == {name: "" if value is None else str(value) for name, value in row.items()}


def test_the_table_names_what_it_is_by(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    text = printed(capsys, home, "table", "model")
    assert all(word in text for word in ("model", "qwen", "small", "search"))
    assert "ads" not in text


def test_a_wrong_since_ends_the_command(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        show_usage(home, team=None, by="day", since="soon")
    assert "--since: found 'soon'" in capsys.readouterr().err
