"""Who a request's headers say it is from, and what a client learns where they say nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from serving.teams import authenticate as module
from serving.teams import tables
from serving.teams.accounts import Accounts, KeyGrant, TeamChange
from serving.teams.authenticate import Authenticator, require_model, require_scope
from serving.teams.caller import Caller, Limits
from serving.teams.database import Database, open_database
from serving.teams.errors import (
    ForbiddenError,
    KeysUnavailableError,
    StoreError,
    UnauthorizedError,
)
from serving.teams.keys import mint
from tests.unit.teams.conftest import SECRET, Clock


@pytest.fixture
def accounts(database: Database, clock: Clock) -> Accounts:
    made = Accounts(database, SECRET, now=clock)
    made.create_team("search", "batch", Limits(requests_per_minute=60))
    return made


@pytest.fixture
def authenticator(database: Database, clock: Clock, accounts: Accounts) -> Authenticator:
    return Authenticator(database, SECRET, now=clock)


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {key}".encode()}


def refused(authenticator: Authenticator, headers: dict[bytes, bytes]) -> str:
    with pytest.raises(UnauthorizedError) as caught:
        authenticator.authenticate(headers)
    return str(caught.value)


async def test_a_key_says_who_asks_and_what_they_may(
    accounts: Accounts, authenticator: Authenticator
) -> None:
    grant = KeyGrant(models=frozenset({"m"}), limits=Limits(tokens_per_day=5))
    new = accounts.create_key("search", "ci", grant)
    await authenticator.refresh()
    assert authenticator.authenticate(bearer(new.text)) == Caller(
        team="search",
        key_id=new.key.id,
        scopes=frozenset({"inference"}),
        models=frozenset({"m"}),
        priority="batch",
        team_limits=Limits(requests_per_minute=60),
        key_limits=Limits(tokens_per_day=5),
    )


async def test_every_way_to_send_a_key_is_taken(
    accounts: Accounts, authenticator: Authenticator
) -> None:
    text = accounts.create_key("search", "ci").text.encode()
    await authenticator.refresh()
    for headers in (
        {b"authorization": b"Bearer " + text},
        {b"authorization": b"bearer  " + text + b" "},
        {b"x-api-key": text},
        {b"x-api-key": text, b"authorization": b"Basic dTpw"},
    ):
        assert authenticator.authenticate(headers).team == "search"


async def test_whatever_is_wrong_the_answer_is_the_same(
    accounts: Accounts, authenticator: Authenticator, clock: Clock
) -> None:
    revoked = accounts.create_key("search", "revoked")
    accounts.revoke_key(revoked.key.id)
    expired = accounts.create_key("search", "expired", KeyGrant(expires_in_s=5))
    live = accounts.create_key("search", "live").text
    clock.at += 5
    await authenticator.refresh()
    offered = [
        {},
        {b"authorization": b""},
        {b"authorization": b"Bearer"},
        {b"authorization": live.encode()},
        {b"authorization": b"Basic " + live.encode()},
        {b"authorization": b"Bearer nonsense", b"x-api-key": live.encode()},
        {b"x-api-key": b"\xff" * 56},
        *(bearer(key) for key in (mint(), revoked.text, expired.text)),
        *(bearer(key) for key in (live[:-1], live + "A", live.upper())),
    ]
    assert len({refused(authenticator, headers) for headers in offered}) == 1


async def test_the_same_work_is_done_whatever_is_wrong(
    accounts: Accounts, authenticator: Authenticator
) -> None:
    live = accounts.create_key("search", "live").text
    await authenticator.refresh()
    with mock.patch.object(module, "digest", wraps=module.digest) as hashing:
        for headers in ({}, bearer("x" * 10_000), bearer(mint())):
            refused(authenticator, headers)
        authenticator.authenticate(bearer(live))
    hashed = [call.args[1] for call in hashing.call_args_list]
    assert [len(key) for key in hashed] == [56] * 4


async def test_a_key_expires_without_a_refresh(
    accounts: Accounts, authenticator: Authenticator, clock: Clock
) -> None:
    text = accounts.create_key("search", "ci", KeyGrant(expires_in_s=60)).text
    await authenticator.refresh()
    clock.at += 59
    authenticator.authenticate(bearer(text))
    clock.at += 1
    refused(authenticator, bearer(text))


async def test_changes_are_seen_after_a_refresh(
    accounts: Accounts, authenticator: Authenticator, clock: Clock
) -> None:
    old = accounts.create_key("search", "ci")
    await authenticator.refresh()
    new = accounts.rotate_key(old.key.id, 60)
    accounts.change_team("search", TeamChange(limits=Limits(requests_per_minute=1)))
    refused(authenticator, bearer(new.text))
    await authenticator.refresh()
    for text in (old.text, new.text):
        caller = authenticator.authenticate(bearer(text))
        assert caller.team_limits.requests_per_minute == 1
    accounts.revoke_key(new.key.id)
    await authenticator.refresh()
    refused(authenticator, bearer(new.text))
    clock.at += 60
    refused(authenticator, bearer(old.text))


async def test_a_key_under_another_secret_is_refused(
    database: Database, accounts: Accounts
) -> None:
    text = accounts.create_key("search", "ci").text
    other = Authenticator(database, b"t" * 32)
    await other.refresh()
    refused(other, bearer(text))


async def test_before_the_keys_were_read_nobody_is_told_that_a_key_is_wrong(
    authenticator: Authenticator,
) -> None:
    with pytest.raises(KeysUnavailableError):
        authenticator.authenticate(bearer(mint()))


async def test_a_database_that_fails_leaves_the_last_keys_and_is_told_once(
    accounts: Accounts,
    authenticator: Authenticator,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    logged: list[str],
) -> None:
    text = accounts.create_key("search", "ci").text
    await authenticator.refresh()
    with monkeypatch.context() as broken:
        broken.setattr(database, "read", mock.Mock(side_effect=StoreError("gone")))
        for _ in range(3):
            await authenticator.refresh()
        assert authenticator.authenticate(bearer(text)).team == "search"
    await authenticator.refresh()
    assert logged == [
        "keys stay as they were last read: gone",
        "keys are read from the database again",
    ]


async def test_a_row_that_cannot_be_read_leaves_the_last_keys(
    accounts: Accounts, authenticator: Authenticator, database: Database
) -> None:
    new = accounts.create_key("search", "ci")
    await authenticator.refresh()
    with database.write() as connection:
        connection.execute(sa.update(tables.keys).values(limits={"from_the_future": 1}))
    await authenticator.refresh()
    assert authenticator.authenticate(bearer(new.text)) == Caller(
        team="search",
        key_id=new.key.id,
        scopes=frozenset({"inference"}),
        models=None,
        priority="batch",
        team_limits=Limits(requests_per_minute=60),
    )


async def test_keys_are_read_again_and_again(
    accounts: Accounts, database: Database, clock: Clock
) -> None:
    authenticator = Authenticator(database, SECRET, refresh_s=0.001, now=clock)
    task = asyncio.create_task(authenticator.keep_fresh())
    for name in ("first", "second"):
        new = await asyncio.to_thread(accounts.create_key, "search", name)
        await _let_in(authenticator, new.text)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _let_in(authenticator: Authenticator, text: str) -> None:
    """Wait until the key is known."""
    async with asyncio.timeout(30):
        while True:
            try:
                authenticator.authenticate(bearer(text))
                return
            except (KeysUnavailableError, UnauthorizedError):
                await asyncio.sleep(0.005)


def test_a_scope_that_a_key_lacks_is_refused() -> None:
    caller = Caller("t", "k", frozenset({"inference"}), None, None)
    require_scope(caller, "inference")
    with pytest.raises(ForbiddenError, match="may not be used for that"):
        require_scope(caller, "admin")


def test_a_model_that_a_key_lacks_is_refused_and_only_its_own_are_named() -> None:
    caller = Caller("t", "k", frozenset(), frozenset({"b", "a"}), None)
    require_model(caller, "a")
    require_model(Caller("t", "k", frozenset(), None, None), "anything")
    with pytest.raises(ForbiddenError, match=r"may use these models only: a, b$"):
        require_model(caller, "secret-model")


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Authenticator, str]]:
    """An authenticator that knows one key, and the key."""
    path: Path = tmp_path_factory.mktemp("ready") / "teams.db"
    database = open_database(f"sqlite:///{path}")
    database.upgrade()
    accounts = Accounts(database, SECRET)
    accounts.create_team("search")
    text = accounts.create_key("search", "ci").text
    authenticator = Authenticator(database, SECRET)
    asyncio.run(authenticator.refresh())
    yield authenticator, text
    database.close()


names = st.sampled_from([b"authorization", b"x-api-key", b"cookie"])
schemes = st.sampled_from([b"", b"Bearer ", b"bearer\t", b"Basic ", b"Bearer Bearer "])
tokens = st.one_of(
    st.binary(max_size=300),
    st.builds(lambda junk: b"msk_" + junk, st.binary(max_size=60)),
    st.builds(lambda: mint().encode()),
)
values = st.builds(lambda scheme, token: scheme + token, schemes, tokens)


@given(st.dictionaries(names, values))
def test_no_header_but_one_with_a_key_is_let_in(
    ready: tuple[Authenticator, str], headers: dict[bytes, bytes]
) -> None:
    refused(ready[0], headers)


@given(st.integers(0, 55), st.integers(0, 255))
def test_a_key_with_one_byte_changed_is_refused(
    ready: tuple[Authenticator, str], place: int, byte: int
) -> None:
    authenticator, text = ready
    changed = bytearray(text.encode())
    changed[place] = byte
    headers = {b"x-api-key": bytes(changed)}
    if bytes(changed) == text.encode():
        assert authenticator.authenticate(headers).team == "search"
    else:
        refused(authenticator, headers)
