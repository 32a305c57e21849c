"""The commands as a shell sees them: what goes to stdout, what to stderr, and how they end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from serving.teams.authenticate import Authenticator
from serving.teams.command import db_app, keys_app, prices_app, teams_app
from serving.teams.database import DATABASE_VARIABLE, database_url, open_database
from serving.teams.keys import SECRET_FILE_VARIABLE, server_secret, well_formed
from tests.unit.teams.postgres import Cluster

app = typer.Typer()
for name, group in (
    ("keys", keys_app),
    ("teams", teams_app),
    ("prices", prices_app),
    ("db", db_app),
):
    app.add_typer(group, name=name)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in (DATABASE_VARIABLE, SECRET_FILE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path / "home"


@pytest.fixture
def named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable names an empty database of either kind."""
    monkeypatch.setenv(DATABASE_VARIABLE, url)


def run(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, obj=lambda: home)


def done(home: Path, *arguments: str) -> str:
    result = run(home, *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def failed(home: Path, *arguments: str) -> str:
    result = run(home, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr.replace("\n", " ").strip()


def listed(home: Path, what: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(done(home, what, "list", "--json"))
    return found


def test_a_key_is_printed_once_and_alone(home: Path) -> None:
    done(home, "teams", "create", "search")
    result = run(home, "keys", "create", "--team", "search", "--name", "ci")
    key = result.stdout.removesuffix("\n")
    assert well_formed(key.encode())
    assert key[-43:] not in result.stderr
    assert "ci of search, for inference, models: all, limits: none, expires: never" in result.stderr
    for shown in (done(home, "keys", "list"), done(home, "keys", "list", "--json")):
        assert key[4:12] in shown and key[-43:] not in shown
    assert all(key[-43:].encode() not in file.read_bytes() for file in home.iterdir())


def test_a_key_that_was_made_opens_the_gateway(home: Path) -> None:
    done(home, "teams", "create", "search", "--rpm", "60", "--priority", "batch")
    options = ("--expires", "90d", "--models", "a, b", "--scopes", "inference,admin")
    limits = (
        "--tpm",
        "5",
        "--concurrent",
        "2",
        "--tokens-per-day",
        "9",
        "--tokens-per-month",
        "99",
    )
    key = done(home, "keys", "create", "--team", "search", "--name", "ci", *options, *limits)
    database = open_database(database_url(home))
    authenticator = Authenticator(database, server_secret(home))
    asyncio.run(authenticator.refresh())
    caller = authenticator.authenticate({b"x-api-key": key.encode()})
    database.close()
    assert (caller.team, caller.priority, caller.models) == ("search", "batch", {"a", "b"})
    assert caller.scopes == {"inference", "admin"}
    assert caller.team_limits.model_dump(exclude_none=True) == {"requests_per_minute": 60}
    assert caller.key_limits.model_dump(exclude_none=True) == {
        "tokens_per_minute": 5,
        "concurrent_requests": 2,
        "tokens_per_day": 9,
        "tokens_per_month": 99,
    }


def test_a_key_is_rotated_and_revoked(home: Path) -> None:
    done(home, "teams", "create", "search")
    old = done(home, "keys", "create", "--team", "search", "--name", "ci")[4:12]
    new = done(home, "keys", "rotate", old, "--overlap", "1h")[4:12]
    assert done(home, "keys", "revoke", new) == f"{new} (ci of search) is revoked\n"
    states = {key["id"]: (key["state"], key["replaced_by"]) for key in listed(home, "keys")}
    assert states == {old: ("rotated", new), new: ("revoked", None)}


def test_a_list_is_of_one_team_where_one_is_named(home: Path) -> None:
    for team in ("search", "ads"):
        done(home, "teams", "create", team)
        done(home, "keys", "create", "--team", team, "--name", f"{team}-app")
    shown = done(home, "keys", "list", "--team", "ads")
    assert "ads-app" in shown and "search-app" not in shown


def test_a_team_is_changed_in_what_is_given(home: Path) -> None:
    done(home, "teams", "create", "search", "--rpm", "60", "--tpm", "1000", "--priority", "batch")
    done(home, "teams", "set", "search", "--rpm", "none", "--concurrent", "4")
    assert [(team["limits"], team["priority"]) for team in listed(home, "teams")] == [
        ({"tokens_per_minute": 1000, "concurrent_requests": 4}, "batch")
    ]
    done(home, "teams", "set", "search", "--priority", "none")
    assert listed(home, "teams")[0]["priority"] is None
    assert "tokens per minute 1,000" in done(home, "teams", "list")


def test_a_price_without_one_for_cached_tokens_has_the_input_price(home: Path) -> None:
    done(home, "prices", "set", "m", "--input", "0.5", "--output", "2")
    assert listed(home, "prices") == [{"model": "m", "input": 0.5, "cached": 0.5, "output": 2}]
    done(home, "prices", "set", "m", "--input", "0.5", "--output", "2", "--cached", "0")
    assert listed(home, "prices")[0]["cached"] == 0
    assert "m" in done(home, "prices", "list")


CREATE = ("keys", "create", "--team", "search", "--name", "ci")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((*CREATE, "--expires", "90"), "--expires: found '90'; write a number and s, m, h, d or w"),
        ((*CREATE, "--scopes", "root"), "--scopes: found 'root'; input should be 'inference' or"),
        ((*CREATE, "--scopes", ","), "--scopes: found"),
        ((*CREATE, "--models", ","), "--models: found"),
        ((*CREATE, "--rpm", "0"), "--rpm: found '0'; write a whole number above 0, or none"),
        ((*CREATE, "--tokens-per-day", "1e6"), "--tokens-per-day: found '1e6'; write a whole"),
        (("teams", "create", "a b"), "team: found 'a b'; write up to 64 letters"),
        (("teams", "create", "search"), "team: 'search' is there already"),
        (("teams", "set", "nobody"), "team: there is none of the name 'nobody'"),
        (("keys", "revoke", "nobody"), "key: there is none with the id 'nobody'"),
        (("keys", "rotate", "x", "--overlap", "soon"), "--overlap: found 'soon'; write a number"),
        (("prices", "set", "m", "--input", "nan", "--output", "1"), "--input: found 'nan'; "),
        (("prices", "set", "m", "--input", "1", "--output", "-1"), "--output: found '-1.0'; "),
    ],
)
def test_what_cannot_be_done_is_told_with_the_cure(
    home: Path, arguments: tuple[str, ...], told: str
) -> None:
    done(home, "teams", "create", "search")
    assert failed(home, *arguments).startswith(f"error: {told}")
    assert listed(home, "keys") == []


@pytest.mark.usefixtures("named")
def test_the_tables_are_brought_up_to_date(home: Path) -> None:
    before = run(home, "db", "status")
    assert before.exit_code == 1
    assert "0001 missing; run `moe-serving db upgrade`" in before.stdout
    assert "applied 0001" in done(home, "db", "upgrade")
    assert "up to date already" in done(home, "db", "upgrade")
    assert "up to date (" in done(home, "db", "status")


def test_a_postgresql_without_tables_is_not_changed_unasked(
    home: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster.database() as empty:
        monkeypatch.setenv(DATABASE_VARIABLE, empty)
        assert "run `moe-serving db upgrade`" in failed(home, "teams", "list")
        assert run(home, "db", "status").exit_code == 1


def test_a_database_that_does_not_answer_ends_a_command_with_the_cure(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATABASE_VARIABLE, "postgresql://u:s3cret@127.0.0.1:1/d")
    for arguments in (("db", "status"), ("keys", "list")):
        told = failed(home, *arguments)
        assert f"check {DATABASE_VARIABLE} and `moe-serving db status`" in told
        assert "s3cret" not in told
