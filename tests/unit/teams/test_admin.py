"""The admin API and /v1/usage: what each operation does, and how each error reads."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.teams.accounts import Accounts
from serving.teams.admin import admin_app
from serving.teams.admin_pages import MOST_ITEMS
from serving.teams.admin_values import UsageValue
from serving.teams.audit import last_entries
from serving.teams.authenticate import Authenticator
from serving.teams.caller import Caller, KeyScope, Limits
from serving.teams.database import Database, open_database
from serving.teams.errors import UnauthorizedError

SECRET = b"s" * 32
SCOPES: frozenset[KeyScope] = frozenset({"inference", "admin"})
ADMIN = Caller("ops", "admin222", SCOPES, models=None, priority=None)
UNLIMITED = dict.fromkeys(Limits.model_fields)


@dataclass
class Clock:
    at: float = 1_000_000.0

    def __call__(self) -> float:
        return self.at


@dataclass
class Sums:
    """A report that gives what it is told to, and notes what it was asked."""

    rows: Sequence[UsageValue] = ()
    asked: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, **asked: Any) -> Sequence[UsageValue]:
        self.asked.append(asked)
        return self.rows


def used(team: str, group: str) -> UsageValue:
    counts = dict.fromkeys(("prompt_tokens", "cached_tokens", "output_tokens"), 3)
    drafted = {"draft_tokens": 2, "accepted_tokens": 1}
    return UsageValue(team=team, group=group, requests=1, cost=None, **counts, **drafted)


@asynccontextmanager
async def client_of(app: ASGIApp, caller: Caller = ADMIN) -> AsyncIterator[httpx.AsyncClient]:
    """A client whose requests come as the gateway passes them on."""

    async def passed_on(
        scope: MutableMapping[str, Any],
        receive: Callable[[], Any],
        send: Callable[[MutableMapping[str, Any]], Any],
    ) -> None:
        given: tuple[Scope, Receive, Send] = ({**scope, "state": {"caller": caller}}, receive, send)
        await app(*given)

    transport = httpx.ASGITransport(passed_on, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sums() -> Sums:
    return Sums()


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file whose tables are up to date, to copy."""
    path = tmp_path_factory.mktemp("admin") / "teams.db"
    opened = open_database(f"sqlite:///{path}")
    opened.upgrade()
    opened.close()
    return path


@pytest.fixture
def store(empty: Path, tmp_path: Path) -> Iterator[Database]:
    """A SQLite database; what `Accounts` does on PostgreSQL has its own tests."""
    opened = open_database(f"sqlite:///{shutil.copy(empty, tmp_path)}")
    yield opened
    opened.close()


def app_of(database: Database, clock: Clock, sums: Sums) -> ASGIApp:
    accounts = partial(Accounts, database, SECRET, now=clock)
    return admin_app(accounts, database, lambda: ("qwen", "tiny"), sums, clock)


@pytest.fixture
def app(store: Database, clock: Clock, sums: Sums) -> ASGIApp:
    return app_of(store, clock, sums)


@pytest.fixture
async def client(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as opened:
        yield opened


def told(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer in OpenAI's shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


async def made(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def got(client: httpx.AsyncClient, path: str, **query: Any) -> dict[str, Any]:
    answer = await client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


# --- teams -----------------------------------------------------------------------------------


async def test_a_team_is_given_as_it_was_made(client: httpx.AsyncClient, clock: Clock) -> None:
    team = await made(client, "/admin/teams", name="search", limits={"tokens_per_day": 9})
    assert team == {
        "name": "search",
        "priority": None,
        "limits": {**UNLIMITED, "tokens_per_day": 9},
        "created": clock.at,
    }
    assert await got(client, "/admin/teams/search") == team
    assert (await got(client, "/admin/teams"))["data"] == [team]


async def test_a_change_leaves_what_is_not_given_and_null_takes_away(
    client: httpx.AsyncClient,
) -> None:
    limits = {"tokens_per_day": 9, "requests_per_minute": 60}
    await made(client, "/admin/teams", name="search", priority="batch", limits=limits)
    changes = {"limits": {"tokens_per_day": None, "concurrent_requests": 4}}
    answer = await client.patch("/admin/teams/search", json=changes)
    assert answer.status_code == 200
    kept = {**UNLIMITED, "requests_per_minute": 60, "concurrent_requests": 4}
    assert (answer.json()["limits"], answer.json()["priority"]) == (kept, "batch")
    answer = await client.patch("/admin/teams/search", json={"priority": None})
    assert (answer.json()["limits"], answer.json()["priority"]) == (kept, None)
    assert await got(client, "/admin/teams/search") == answer.json()


async def test_a_taken_name_is_a_conflict_whose_cure_is_the_api(client: httpx.AsyncClient) -> None:
    await made(client, "/admin/teams", name="search")
    error = told(await client.post("/admin/teams", json={"name": "search"}), 409)
    assert (error["code"], error["param"]) == ("conflict", "team")
    assert "'search' is there already; change it with PATCH /admin/teams/" in error["message"]
    assert "moe-serving" not in error["message"]


@pytest.mark.parametrize("method", ["GET", "PATCH"])
@pytest.mark.parametrize("name", ["ads", "%00", "%ff", "a'b", "a" * 500, "%F0%9F%98%80"])
async def test_an_unknown_team_is_not_found(
    client: httpx.AsyncClient, method: str, name: str
) -> None:
    body = {} if method == "PATCH" else None
    error = told(await client.request(method, f"/admin/teams/{name}", json=body), 404)
    assert (error["code"], error["param"]) == ("not_found", "team")
    assert "GET /admin/teams lists them" in error["message"]
    assert len(error["message"]) < 200


# --- keys ------------------------------------------------------------------------------------


async def test_a_new_key_is_shown_once_and_opens_the_gateway(
    client: httpx.AsyncClient, store: Database, clock: Clock
) -> None:
    await made(client, "/admin/teams", name="search")
    grant = {"scopes": ["inference"], "models": ["qwen"], "expires_in_s": 90}
    new = await made(client, "/admin/keys", team="search", name="ci", **grant)
    text = new.pop("key")
    assert (new["state"], new["models"], new["expires"]) == ("live", ["qwen"], clock.at + 90)
    listed = await client.get("/admin/keys")
    assert listed.json()["data"] == [new]
    audit = await client.get("/admin/audit")
    assert text not in listed.text + audit.text

    gate = Authenticator(store, SECRET, now=clock)
    await gate.refresh()
    caller = gate.authenticate({b"authorization": b"Bearer " + text.encode()})
    assert (caller.team, caller.key_id, caller.models) == ("search", new["id"], {"qwen"})


async def test_a_revoked_key_is_refused(
    client: httpx.AsyncClient, store: Database, clock: Clock
) -> None:
    await made(client, "/admin/teams", name="search")
    new = await made(client, "/admin/keys", team="search", name="ci")
    for _ in range(2):
        answer = await client.post(f"/admin/keys/{new['id']}/revoke")
        assert answer.status_code == 200
        assert (answer.json()["state"], answer.json()["revoked_at"]) == ("revoked", clock.at)
    gate = Authenticator(store, SECRET, now=clock)
    await gate.refresh()
    with pytest.raises(UnauthorizedError):
        gate.authenticate({b"x-api-key": new["key"].encode()})


@pytest.mark.parametrize(
    ("body", "lasts_s"), [(None, 86_400.0), ({}, 86_400.0), ({"overlap_s": 7}, 7)]
)
async def test_a_rotated_key_lives_beside_the_new_one_for_the_overlap(
    client: httpx.AsyncClient, clock: Clock, body: dict[str, int] | None, lasts_s: float
) -> None:
    await made(client, "/admin/teams", name="search")
    old = await made(client, "/admin/keys", team="search", name="ci", models=["qwen"])
    answer = await client.post(f"/admin/keys/{old['id']}/rotate", json=body)
    assert answer.status_code == 201
    new = answer.json()
    assert new["key"] != old["key"]
    assert (new["team"], new["name"], new["models"]) == ("search", "ci", ["qwen"])
    keys = {key["id"]: key for key in (await got(client, "/admin/keys"))["data"]}
    assert keys[old["id"]]["replaced_by"] == new["id"]
    assert (keys[old["id"]]["state"], keys[old["id"]]["expires"]) == ("rotated", clock.at + lasts_s)

    error = told(await client.post(f"/admin/keys/{old['id']}/rotate"), 409)
    assert error["param"] == "key"
    assert error["message"].endswith("; make a new one with POST /admin/keys")


async def test_keys_are_listed_by_team(client: httpx.AsyncClient) -> None:
    for team in ("ads", "search"):
        await made(client, "/admin/teams", name=team)
        await made(client, "/admin/keys", team=team, name="ci")
    listed = await got(client, "/admin/keys", team="ads")
    assert [key["team"] for key in listed["data"]] == ["ads"]
    assert told(await client.get("/admin/keys", params={"team": "shop"}), 404)["param"] == "team"


@pytest.mark.parametrize("act", ["revoke", "rotate"])
async def test_an_unknown_key_is_not_found(client: httpx.AsyncClient, act: str) -> None:
    error = told(await client.post(f"/admin/keys/nosuch22/{act}"), 404)
    assert error["param"] == "key"
    assert "GET /admin/keys lists them" in error["message"]


async def test_a_key_of_an_unknown_team_is_not_made(client: httpx.AsyncClient) -> None:
    told(await client.post("/admin/keys", json={"team": "search", "name": "ci"}), 404)
    assert (await got(client, "/admin/keys"))["data"] == []


# --- prices, audit, pages ----------------------------------------------------------------------


async def test_a_price_is_listed_as_it_was_last_set(client: httpx.AsyncClient) -> None:
    path = "/admin/prices/Qwen/Qwen3.5-35B-A3B"
    for price in ({"input": 1, "output": 2, "cached": 0.5}, {"input": 3, "output": 4}):
        answer = await client.put(path, json=price)
        assert answer.status_code == 200
    last = {"model": "Qwen/Qwen3.5-35B-A3B", "input": 3.0, "cached": 3.0, "output": 4.0}
    assert answer.json() == last
    assert (await got(client, "/admin/prices"))["data"] == [last]


async def test_every_change_is_recorded_under_the_key_that_asked(
    client: httpx.AsyncClient, store: Database
) -> None:
    await made(client, "/admin/teams", name="search")
    await client.patch("/admin/teams/search", json={"priority": "batch"})
    key = (await made(client, "/admin/keys", team="search", name="ci"))["id"]
    await client.post(f"/admin/keys/{key}/rotate")
    await client.post(f"/admin/keys/{key}/revoke")
    await client.put("/admin/prices/qwen", json={"input": 1, "output": 2})
    acts = [
        ("price.set", "qwen"),
        ("key.revoke", key),
        ("key.rotate", key),
        ("key.create", key),
        ("team.change", "search"),
        ("team.create", "search"),
    ]
    assert [(entry.act, entry.subject) for entry in last_entries(store)] == acts
    listed = (await got(client, "/admin/audit"))["data"]
    assert [(entry["act"], entry["subject"]) for entry in listed] == acts
    assert {entry["actor"] for entry in listed} == {ADMIN.key_id}


async def test_what_was_refused_is_not_recorded(client: httpx.AsyncClient) -> None:
    await client.post("/admin/teams", json={"name": "no name"})
    await client.patch("/admin/teams/search", json={"priority": "batch"})
    await client.put("/admin/prices/qwen", json={"input": -1, "output": 2})
    assert (await got(client, "/admin/audit"))["data"] == []


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6])
@pytest.mark.parametrize(
    ("path", "name"), [("teams", "name"), ("keys", "id"), ("prices", "model"), ("audit", "id")]
)
async def test_pages_give_a_list_whole_and_in_its_order(
    client: httpx.AsyncClient, path: str, name: str, limit: int
) -> None:
    for number in range(5):
        if path in ("teams", "keys"):
            await made(client, "/admin/teams", name=f"t{number}")
        if path == "keys":
            await made(client, "/admin/keys", team=f"t{number}", name="ci")
        if path in ("prices", "audit"):
            await client.put(f"/admin/prices/m{number}", json={"input": 1, "output": 2})
    whole = await got(client, f"/admin/{path}")
    assert len(whole["data"]) == 5 and not whole["has_more"]
    seen: list[dict[str, Any]] = []
    query: dict[str, Any] = {"limit": limit}
    more = True
    while more:
        part = await got(client, f"/admin/{path}", **query)
        seen += part["data"]
        more, query["after"] = part["has_more"], part["last_id"]
        assert len(part["data"]) <= limit
        assert part["last_id"] == str(seen[-1][name])
    assert seen == whole["data"]


async def test_the_audit_log_is_paged_by_either_database(
    database: Database, clock: Clock, sums: Sums
) -> None:
    async with client_of(app_of(database, clock, sums)) as client:
        for name in ("a", "b", "c"):
            await made(client, "/admin/teams", name=name)
        first = await got(client, "/admin/audit", limit=2)
        second = await got(client, "/admin/audit", limit=2, after=first["last_id"])
        assert [entry["subject"] for entry in first["data"] + second["data"]] == ["c", "b", "a"]
        assert (first["has_more"], second["has_more"]) == (True, False)
        assert (await got(client, "/admin/audit", after=2**53 - 1))["data"][0]["subject"] == "c"


@pytest.mark.parametrize("name", ["%00", "%ff"])
async def test_no_character_in_a_name_upsets_either_database(
    database: Database, clock: Clock, sums: Sums, name: str
) -> None:
    async with client_of(app_of(database, clock, sums)) as client:
        told(await client.get(f"/admin/teams/{name}"), 404)
        told(await client.post(f"/admin/keys/{name}/revoke"), 404)
        told(await client.get(f"/admin/keys?team={name}"), 400)
        told(await client.put(f"/admin/prices/{name}", json={"input": 1, "output": 2}), 400)


async def test_an_empty_list_has_no_last_item(client: httpx.AsyncClient) -> None:
    empty = {"object": "list", "data": [], "last_id": None, "has_more": False}
    for path in ("teams", "keys", "prices", "audit"):
        assert await got(client, f"/admin/{path}") == empty


async def test_a_page_after_what_is_not_there_is_not_found(client: httpx.AsyncClient) -> None:
    error = told(await client.get("/admin/teams", params={"after": "ads"}), 404)
    assert error["param"] == "after"


# --- usage -----------------------------------------------------------------------------------


async def test_the_usage_of_all_teams_is_what_the_report_gives(
    client: httpx.AsyncClient, sums: Sums
) -> None:
    sums.rows = [used("ads", "qwen"), used("search", "qwen")]
    since, until = "1970-01-02", "1970-01-03T01:00:00+01:00"
    found = await got(client, "/admin/usage", by="model", since=since, until=until)
    assert found["data"] == [row.model_dump() for row in sums.rows]
    everyone = {"team": None, "models": None}
    assert sums.asked == [{"by": "model", "since": 86_400.0, "until": 2 * 86_400.0, **everyone}]


async def test_usage_of_one_team_and_model_is_asked_for_alone(
    client: httpx.AsyncClient, sums: Sums
) -> None:
    await made(client, "/admin/teams", name="search")
    await got(client, "/admin/usage", team="search", model="qwen")
    asked = {"team": "search", "models": {"qwen"}, "by": "day", "since": None, "until": None}
    assert sums.asked == [asked]
    assert told(await client.get("/admin/usage?team=ads"), 404)["param"] == "team"


async def test_usage_comes_in_pages(client: httpx.AsyncClient, sums: Sums) -> None:
    sums.rows = [used("ads", "a"), used("ads", "b"), used("search", "a")]
    first = await got(client, "/admin/usage", limit=2)
    assert (len(first["data"]), first["has_more"]) == (2, True)
    second = await got(client, "/admin/usage", limit=2, after=first["last_id"])
    assert first["data"] + second["data"] == [row.model_dump() for row in sums.rows]


def key_of(models: Collection[str] | None) -> Caller:
    scopes: frozenset[KeyScope] = frozenset({"inference"})
    allowed = None if models is None else frozenset(models)
    return Caller("search", "search22", scopes, models=allowed, priority=None)


@pytest.mark.parametrize("models", [None, {"qwen"}])
async def test_a_caller_sees_its_own_team_and_its_keys_models_only(
    app: ASGIApp, sums: Sums, models: set[str] | None
) -> None:
    async with client_of(app, key_of(models)) as client:
        await got(client, "/v1/usage", by="key")
        assert (sums.asked[0]["team"], sums.asked[0]["models"]) == ("search", models)
        await got(client, "/v1/usage", model="qwen")
        assert (sums.asked[1]["team"], sums.asked[1]["models"]) == ("search", {"qwen"})
        error = told(await client.get("/v1/usage?team=ads"), 400)
        assert error["param"] == "team"
    assert len(sums.asked) == 2


async def test_a_model_the_key_may_not_use_is_answered_alike_whether_it_is_served_or_not(
    app: ASGIApp, sums: Sums
) -> None:
    async with client_of(app, key_of({"qwen", "old"})) as client:
        served = told(await client.get("/v1/usage?model=tiny"), 403)
        unknown = told(await client.get("/v1/usage?model=nosuch"), 403)
    assert served == unknown
    assert (served["code"], served["param"]) == ("permission_denied", "model")
    assert "old, qwen" in served["message"] and "tiny" not in served["message"]
    assert sums.asked == []


@pytest.mark.parametrize(
    ("models", "names"), [(None, "qwen, tiny"), ({"tiny", "nosuch"}, "tiny"), ({"nosuch"}, "none")]
)
async def test_an_unknown_model_names_only_those_the_key_may_use(
    app: ASGIApp, models: set[str] | None, names: str
) -> None:
    async with client_of(app, key_of(models)) as client:
        error = told(await client.get("/v1/usage?model=nosuch"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"].endswith(f"; served: {names}")


async def test_usage_of_a_model_that_is_no_longer_served_is_still_told(
    app: ASGIApp, sums: Sums
) -> None:
    sums.rows = [used("search", "2026-01-01")]
    async with client_of(app, key_of(None)) as client:
        assert len((await got(client, "/v1/usage", model="old"))["data"]) == 1


async def test_without_a_report_there_is_nothing_of_usage(store: Database) -> None:
    async with client_of(admin_app(partial(Accounts, store, SECRET), store, tuple)) as client:
        for path in ("/admin/usage", "/v1/usage"):
            assert told(await client.get(path), 404)["code"] == "unknown_path"


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "code", "said"),
    [
        ({}, "name", "missing_value", "missing"),
        ({"name": "a b"}, "name", "invalid_value", "found 'a b'; string should match"),
        ({"name": "a\n"}, "name", "invalid_value", "should match"),
        ({"name": 5}, "name", "invalid_value", "found 5; input should be a valid string"),
        ({"name": "a", "nmae": 1}, "nmae", "unknown_value", "no field here"),
        (
            {"name": "a", "priority": "soon"},
            "priority",
            "invalid_value",
            "'interactive' or 'batch'",
        ),
    ],
)
async def test_a_value_that_is_not_usable_is_named_with_its_cure(
    client: httpx.AsyncClient, body: dict[str, Any], param: str, code: str, said: str
) -> None:
    error = told(await client.post("/admin/teams", json=body), 400)
    assert (error["param"], error["code"]) == (param, code)
    assert error["message"].startswith(f"{param}: ") and said in error["message"]


@pytest.mark.parametrize("value", [0, -1, 2**53, 1.5, 1.0, "7", True, float("nan"), 10**400, [1]])
async def test_a_limit_is_a_whole_number_above_0_that_json_holds_exactly(
    client: httpx.AsyncClient, value: object
) -> None:
    body = {"name": "a", "limits": {"tokens_per_day": value}}
    # Not httpx's own encoder, which refuses NaN.
    error = told(await post_text(client, json_of(body)), 400)
    assert error["param"] == "limits.tokens_per_day"
    body["limits"] = {"tokens_per_day": 2**53 - 1}
    assert (await client.post("/admin/teams", json=body)).status_code == 201


@pytest.mark.parametrize("limit", ["0", str(MOST_ITEMS + 1), "x", "", "1e9", "9" * 5000])
async def test_a_page_has_a_bounded_size(client: httpx.AsyncClient, limit: str) -> None:
    error = told(await client.get("/admin/teams", params={"limit": limit}), 400)
    assert error["param"] == "limit"
    assert len(error["message"]) < 250


async def test_a_long_value_is_shortened(client: httpx.AsyncClient) -> None:
    body = {"name": "a", "x" * 10_000: {"y" * 10_000: ["z" * 10_000] * 50}}
    error = told(await client.post("/admin/teams", json=body), 400)
    assert len(error["message"]) < 250 and len(error["param"]) < 100


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"name"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"name": ' + b"9" * 5000 + b"}",
        b'{"\\ud800": 1}',
        b'{"name": "a", "\\u0000": 1}',
    ],
    ids=lambda text: repr(text[:12]),
)
async def test_a_body_that_is_no_object_of_json_is_refused(
    client: httpx.AsyncClient, text: bytes
) -> None:
    error = told(await post_text(client, text), 400)
    assert error["code"] in ("invalid_json", "unknown_value")


async def test_a_body_of_another_type_is_refused_with_the_one_to_send(
    client: httpx.AsyncClient,
) -> None:
    answer = await client.post("/admin/teams", data={"name": "a"})
    assert "content-type: application/json" in told(answer, 400)["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/admin/teams", "GET, POST"),
        ("PUT", "/admin/teams/search", "GET, PATCH"),
        ("GET", "/admin/keys/nosuch22/revoke", "POST"),
        ("POST", "/v1/usage", "GET"),
    ],
)
async def test_another_method_is_told_those_that_the_path_takes(
    client: httpx.AsyncClient, method: str, path: str, allowed: str
) -> None:
    answer = await client.request(method, path)
    error = told(answer, 405)
    assert answer.headers["allow"] == allowed
    assert error["message"] == f"{path} takes {allowed}, not {method}"


@pytest.mark.parametrize(
    "path", ["/admin", "/admin/", "/admin/teams/", "/admin/docs", "/v1/usage/search", "/admin/%ff"]
)
async def test_an_unknown_path_is_not_found(client: httpx.AsyncClient, path: str) -> None:
    assert told(await client.get(path), 404)["code"] == "unknown_path"


@pytest.fixture
def nowhere() -> Iterator[Database]:
    """A database that cannot be reached."""
    opened = open_database("postgresql://someone:hidden@127.0.0.1:1/none")
    yield opened
    opened.close()


async def test_a_database_that_is_away_is_a_503_that_tells_nothing_of_it(
    nowhere: Database, sums: Sums, caplog: pytest.LogCaptureFixture
) -> None:
    app = admin_app(partial(Accounts, nowhere, SECRET), nowhere, lambda: (), sums)
    async with client_of(app) as client:
        for path in ("teams", "keys", "prices", "audit", "usage?team=search"):
            answer = await client.get(f"/admin/{path}")
            error = told(answer, 503)
            assert int(answer.headers["retry-after"]) > 0
            assert "127.0.0.1" not in error["message"] and "someone" not in error["message"]
    assert "/admin/audit" in caplog.text and "hidden" not in caplog.text


async def test_a_fault_of_our_own_tells_no_trace(store: Database, sums: Sums) -> None:
    def accounts(actor: str) -> Accounts:
        raise RuntimeError("a detail of the inside")

    async with client_of(admin_app(accounts, store, lambda: (), sums)) as client:
        answer = await client.get("/admin/teams")
    assert told(answer, 500)["code"] == "internal_error"
    assert "inside" not in answer.text


async def test_the_database_is_never_waited_for_on_the_event_loop(
    store: Database, sums: Sums
) -> None:
    threads = set()

    class Watched(Accounts):
        def list_teams(self) -> Any:
            threads.add(threading.get_ident())
            return super().list_teams()

    async with client_of(
        admin_app(partial(Watched, store, SECRET), store, lambda: (), sums)
    ) as client:
        await got(client, "/admin/teams")
    assert threads and threading.get_ident() not in threads


async def test_replies_are_not_kept_by_who_passes_them_on(client: httpx.AsyncClient) -> None:
    assert (await client.get("/admin/keys")).headers["cache-control"] == "no-store"


def json_of(body: object) -> bytes:
    return json.dumps(body).encode()


async def post_text(client: httpx.AsyncClient, text: bytes) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return await client.post("/admin/teams", content=text, headers=headers)
