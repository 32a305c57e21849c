"""Teams, keys and prices: what a change leaves in the tables and in the audit log."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from serving.teams import accounts as accounts_module
from serving.teams import tables
from serving.teams.accounts import Accounts, KeyGrant, Price, TeamChange, parse_duration
from serving.teams.audit import last_entries
from serving.teams.caller import Limits
from serving.teams.database import Database
from serving.teams.errors import StoreError, TeamsError, UnknownNameError
from serving.teams.keys import digest
from tests.unit.teams.conftest import SECRET, Clock

DAY_S = 86_400.0


@pytest.fixture
def accounts(database: Database, clock: Clock) -> Accounts:
    return Accounts(database, SECRET, now=clock)


def acts(database: Database) -> list[tuple[str, str, str]]:
    return [(entry.actor, entry.act, entry.subject) for entry in reversed(last_entries(database))]


def test_a_team_is_read_as_it_was_made(accounts: Accounts) -> None:
    made = accounts.create_team("search", "batch", Limits(requests_per_minute=60))
    assert accounts.team("search") == made
    assert accounts.create_team("ads").limits == Limits()
    assert [team.name for team in accounts.list_teams()] == ["ads", "search"]


def test_a_change_of_a_team_leaves_what_it_does_not_give(accounts: Accounts) -> None:
    accounts.create_team("search", "batch", Limits(requests_per_minute=60, tokens_per_day=9))
    limits = Limits(requests_per_minute=None, concurrent_requests=4)
    changed = accounts.change_team("search", TeamChange(limits=limits))
    assert changed.limits == Limits(concurrent_requests=4, tokens_per_day=9)
    assert changed.priority == "batch"
    changed = accounts.change_team("search", TeamChange(priority=None))
    assert (changed.priority, changed.limits.concurrent_requests) == (None, 4)
    assert accounts.team("search") == changed


def test_changes_of_one_team_at_once_are_all_kept(accounts: Accounts) -> None:
    accounts.create_team("search")
    changes = [TeamChange(limits=Limits(**{name: 7})) for name in Limits.model_fields]
    with ThreadPoolExecutor(len(changes)) as pool:
        list(pool.map(lambda change: accounts.change_team("search", change), changes))
    assert set(accounts.team("search").limits.model_dump().values()) == {7}


def test_a_taken_name_is_told(accounts: Accounts) -> None:
    accounts.create_team("search")
    with pytest.raises(TeamsError, match=r"'search' is there already; .*teams set search"):
        accounts.create_team("search")


@pytest.mark.parametrize("name", ["", "a b", "-a", "ä", "a" * 65, "a\n", "a/b"])
def test_a_name_that_cannot_be_one_is_refused(accounts: Accounts, name: str) -> None:
    accounts.create_team("search")
    with pytest.raises(TeamsError, match=r"team: found .*write up to 64 letters"):
        accounts.create_team(name)
    with pytest.raises(TeamsError, match=r"name: found .*write up to 64 letters"):
        accounts.create_key("search", name)


def test_a_key_is_stored_as_its_digest_alone(accounts: Accounts, database: Database) -> None:
    accounts.create_team("search")
    new = accounts.create_key("search", "ci")
    with database.read() as connection:
        row = connection.execute(sa.select(tables.keys)).one()
        audited = connection.execute(sa.select(tables.audit)).all()
    assert row.digest == digest(SECRET, new.text.encode()).hex()
    random_part = new.text[-43:]
    assert random_part not in repr(row) + repr(audited) + repr(new)
    assert row.digest not in repr(audited)


def test_a_key_is_listed_as_it_was_made(accounts: Accounts, clock: Clock) -> None:
    accounts.create_team("search")
    accounts.create_team("ads")
    limits = Limits(tokens_per_minute=10)
    grant = KeyGrant(
        scopes=frozenset({"admin", "inference"}),
        models=frozenset({"a", "b"}),
        limits=limits,
        expires_in_s=90 * DAY_S,
    )
    key = accounts.create_key("search", "ci", grant).key
    other = accounts.create_key("ads", "app").key
    assert accounts.list_keys() == (other, key)
    assert accounts.list_keys("search") == (key,)
    assert (key.scopes, key.models, key.limits) == (grant.scopes, grant.models, limits)
    assert key.expires == clock.at + 90 * DAY_S
    assert (other.scopes, other.models, other.expires) == (frozenset({"inference"}), None, None)


def test_a_key_without_models_is_stored_as_null(accounts: Accounts, database: Database) -> None:
    accounts.create_team("search")
    accounts.create_key("search", "ci")
    query = sa.select(sa.func.count()).where(tables.keys.c.models.is_(None))
    with database.read() as connection:
        assert connection.scalar(query) == 1


@pytest.mark.parametrize(
    "act",
    [
        lambda accounts: accounts.create_key("nobody", "ci"),
        lambda accounts: accounts.list_keys("nobody"),
        lambda accounts: accounts.team("nobody"),
        lambda accounts: accounts.change_team("nobody", TeamChange()),
        lambda accounts: accounts.revoke_key("nobody"),
        lambda accounts: accounts.rotate_key("nobody"),
    ],
)
def test_a_name_that_is_not_there_is_told(
    accounts: Accounts, act: Callable[[Accounts], Any], database: Database
) -> None:
    with pytest.raises(UnknownNameError, match=r"'nobody'; `moe-serving (keys|teams) list`"):
        act(accounts)
    assert acts(database) == []


def test_a_revoked_key_stays_revoked_from_the_first_time(accounts: Accounts, clock: Clock) -> None:
    accounts.create_team("search")
    key_id = accounts.create_key("search", "ci").key.id
    first = accounts.revoke_key(key_id)
    clock.at += 10
    assert accounts.revoke_key(key_id) == first
    assert first.state(clock.at) == "revoked"


def test_a_rotated_key_stays_valid_for_the_overlap(accounts: Accounts, clock: Clock) -> None:
    accounts.create_team("search")
    grant = KeyGrant(models=frozenset({"a"}), limits=Limits(tokens_per_day=5))
    old = accounts.create_key("search", "ci", grant).key
    new = accounts.rotate_key(old.id, 3600).key
    old = next(key for key in accounts.list_keys() if key.id == old.id)
    assert (new.team, new.name, new.models, new.limits) == ("search", "ci", old.models, old.limits)
    assert (old.replaced_by, old.expires) == (new.id, clock.at + 3600)
    states = [(old.state(clock.at + s), new.state(clock.at + s)) for s in (3599, 3600)]
    assert states == [("rotated", "live"), ("expired", "live")]


def test_a_rotated_key_ends_no_later_than_it_would_have(accounts: Accounts, clock: Clock) -> None:
    accounts.create_team("search")
    old = accounts.create_key("search", "ci", KeyGrant(expires_in_s=10 * DAY_S)).key
    clock.at += 9.5 * DAY_S
    new = accounts.rotate_key(old.id).key
    assert {key.id: key.expires for key in accounts.list_keys()}[old.id] == old.expires
    assert new.expires == clock.at + 10 * DAY_S


def test_a_key_is_rotated_once(accounts: Accounts) -> None:
    accounts.create_team("search")
    old = accounts.create_key("search", "ci").key

    def rotate(_: int) -> str:
        try:
            return accounts.rotate_key(old.id).key.id
        except TeamsError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(rotate, range(4)))
    made = [text for text in told if len(text) == 8]
    assert len(made) == 1
    assert sum(f"{old.id} is rotated (to {made[0]})" in text for text in told) == 3


@pytest.mark.parametrize("overlap_s", [-1, float("nan"), float("inf")])
def test_an_overlap_that_is_none_is_refused(accounts: Accounts, overlap_s: float) -> None:
    with pytest.raises(TeamsError, match=r"overlap: found .*for instance 24h"):
        accounts.rotate_key("any", overlap_s)


def test_a_revoked_key_is_not_rotated(accounts: Accounts) -> None:
    accounts.create_team("search")
    key_id = accounts.create_key("search", "ci").key.id
    accounts.revoke_key(key_id)
    with pytest.raises(TeamsError, match=f"{key_id} is revoked; make a new one"):
        accounts.rotate_key(key_id)


def test_a_price_replaces_the_one_before(accounts: Accounts) -> None:
    accounts.set_price("m", Price(input=1, cached=0.5, output=2))
    second = Price(input=3, cached=0, output=4)
    accounts.set_price("m", second)
    assert accounts.list_prices() == {"m": second}


@pytest.mark.parametrize("amount", [-1, float("nan"), float("inf")])
def test_a_price_that_is_none_is_refused(amount: float) -> None:
    with pytest.raises(ValidationError):
        Price(input=amount, cached=0, output=0)


@pytest.mark.parametrize("model", ["", "a b", "a\x00", "\ud800", "a" * 256])
def test_what_no_model_is_called_is_refused(accounts: Accounts, model: str) -> None:
    with pytest.raises(TeamsError, match=r"model: found '.*'; write its id"):
        accounts.set_price(model, Price(input=1, cached=1, output=1))
    with pytest.raises(ValidationError):
        KeyGrant(models=frozenset({model}))


@pytest.mark.parametrize("name", ["", "a\x00", "\ud800", "x" * 1000, "' OR 1=1 --"])
def test_a_name_that_a_database_cannot_hold_is_unknown(accounts: Accounts, name: str) -> None:
    for find in (accounts.team, accounts.list_keys, accounts.revoke_key, accounts.rotate_key):
        with pytest.raises(UnknownNameError):
            find(name)


def test_every_change_is_in_the_audit_log(database: Database, clock: Clock) -> None:
    admin = Accounts(database, SECRET, "adminkey", clock)
    admin.create_team("search", limits=Limits(tokens_per_day=5))
    admin.change_team("search", TeamChange(priority="batch"))
    old = admin.create_key("search", "ci").key.id
    new = admin.rotate_key(old).key.id
    Accounts(database, SECRET, now=clock).revoke_key(new)
    admin.set_price("m", Price(input=1, cached=1, output=1))
    assert acts(database) == [
        ("adminkey", "team.create", "search"),
        ("adminkey", "team.change", "search"),
        ("adminkey", "key.create", old),
        ("adminkey", "key.rotate", old),
        ("local", "key.revoke", new),
        ("adminkey", "price.set", "m"),
    ]
    newest = last_entries(database)
    assert newest[-1].detail == {"priority": None, "limits": {"tokens_per_day": 5}}
    assert {entry.at for entry in newest} == {clock.at}
    assert last_entries(database, 1) == newest[:1]


def test_a_change_that_cannot_be_audited_is_not_made(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts.create_team("search")
    key_id = accounts.create_key("search", "ci").key.id

    def fail(*_: object) -> None:
        raise StoreError("no room")

    monkeypatch.setattr(accounts_module, "record", fail)
    for act in (
        lambda: accounts.create_team("ads"),
        lambda: accounts.change_team("search", TeamChange(priority="batch")),
        lambda: accounts.create_key("search", "app"),
        lambda: accounts.revoke_key(key_id),
        lambda: accounts.rotate_key(key_id),
        lambda: accounts.set_price("m", Price(input=1, cached=1, output=1)),
    ):
        with pytest.raises(StoreError, match="no room"):
            act()
    assert [(team.name, team.priority) for team in accounts.list_teams()] == [("search", None)]
    assert [(key.id, key.state(0)) for key in accounts.list_keys()] == [(key_id, "live")]
    assert accounts.list_prices() == {}


@given(st.integers(1, 876_000), st.sampled_from([("s", 1), ("m", 60), ("h", 3600)]))
def test_a_duration_is_a_number_and_a_unit(number: int, unit: tuple[str, int]) -> None:
    assert parse_duration("expires", f"{number}{unit[0]}") == number * unit[1]


@pytest.mark.parametrize(
    "text", ["", "90", "d", "0d", "-1d", "9999w", "1.5h", "1y", "1d ", "٣d", "1" * 7 + "d"]
)
def test_a_duration_that_is_none_is_told_with_an_example(text: str) -> None:
    with pytest.raises(TeamsError, match=r"expires: found .*for instance 90d"):
        parse_duration("expires", text)
