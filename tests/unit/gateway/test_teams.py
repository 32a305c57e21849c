"""The gateway with keys: who is let in, to what, and how often."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.engines.keys import Send
from serving.gateway.leases import EngineState
from serving.gateway.teams import Teams
from serving.router.settings import Routing
from serving.router.table import ModelRoute, VariantRoute
from serving.teams.accounts import Accounts, KeyGrant
from serving.teams.actor import QuotaBank
from serving.teams.caller import Limits
from serving.teams.database import Database, open_database
from serving.teams.ledger import Ledger, SqlUsageStore
from serving.teams.quota_store import SqlQuotaStore
from serving.teams.spool import Spool
from tests.unit.gateway.harness import COMPLETIONS, MODEL, PATIENCE_S, Stack, events, start, write

SECRET = b"s" * 32
OTHER = ModelRoute(
    id="other",
    default_variant="plain",
    variants=(VariantRoute(variant="plain", app_name="engine-other", max_model_len=4096),),
)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = open_database(f"sqlite:///{tmp_path / 'teams.db'}")
    opened.upgrade()
    yield opened
    opened.close()


@pytest.fixture
async def accounts(stack: Stack, database: Database, tmp_path: Path) -> AsyncIterator[Accounts]:
    """Of the team `search`; the gateway serves a second model and needs keys from now on."""
    accounts = Accounts(database, SECRET)
    accounts.create_team("search", None, Limits())
    stack.route(Routing(), OTHER, keys=True, home=tmp_path)
    stack.pool.states = {**stack.pool.states, "engine-other": EngineState(1, "RUNNING")}
    bank = QuotaBank(lambda: SqlQuotaStore(database))
    ledger = Ledger(Spool(tmp_path / "usage"), SqlUsageStore(database))
    stack.app.teams = Teams(database, SECRET, bank, ledger, stack.app.models)
    yield accounts
    await stack.app.teams.close()


async def key(stack: Stack, accounts: Accounts, **grant: Any) -> dict[str, str]:
    """The headers of a new key, which the gateway knows."""
    made = accounts.create_key("search", "test", KeyGrant(**grant))
    assert stack.app.teams is not None
    await stack.app.teams.refresh()
    return {"authorization": f"Bearer {made.text}"}


async def ask(stack: Stack, headers: dict[str, str], **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 9, **fields}
    return await stack.client.post(COMPLETIONS, json=body, headers=headers)


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer msk_x"}, {"x-api-key": "msk_" + "a" * 52}]
)
@pytest.mark.parametrize(
    "path", [COMPLETIONS, "/v1/models", "/metrics", "/admin/teams", "/nothing"]
)
async def test_without_a_valid_key_nothing_is_told(
    stack: Stack, accounts: Accounts, headers: dict[str, str], path: str
) -> None:
    await key(stack, accounts)
    reply = await stack.client.post(path, json={}, headers=headers)
    assert reply.status_code == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert stack.engine.paths == []


async def test_health_needs_no_key(stack: Stack, accounts: Accounts) -> None:
    assert (await stack.client.get("/healthz")).status_code == 200
    assert (await stack.client.get("/readyz")).status_code == 200


async def test_a_gateway_that_has_not_read_the_keys_lets_nobody_in(
    stack: Stack, accounts: Accounts
) -> None:
    assert (await ask(stack, {"x-api-key": "msk"})).status_code == 503
    teams, stack.app.teams = stack.app.teams, None
    assert (await ask(stack, {"x-api-key": "msk"})).status_code == 503
    stack.app.teams = teams


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
async def test_a_key_is_taken_from_either_header_and_goes_no_further(
    stack: Stack, accounts: Accounts, name: str
) -> None:
    text = (await key(stack, accounts))["authorization"].removeprefix("Bearer ")
    reply = await ask(stack, {name: f"Bearer {text}" if name == "authorization" else text})
    assert reply.status_code == 200
    assert text not in json.dumps(stack.engine.headers)


async def test_a_key_for_some_models_learns_nothing_of_the_others(
    stack: Stack, accounts: Accounts
) -> None:
    headers = await key(stack, accounts, models=[MODEL])
    listed = (await stack.client.get("/v1/models", headers=headers)).json()["data"]
    assert {card["root"] for card in listed} == {MODEL}
    assert (await ask(stack, headers)).status_code == 200
    replies = [await ask(stack, headers, model=model) for model in ("other", "nothing")]
    replies.append(await stack.client.get("/v1/models/other", headers=headers))
    assert {reply.status_code for reply in replies} == {403}
    assert {reply.text for reply in replies} == {replies[0].text}
    assert MODEL in replies[0].json()["error"]["message"]
    missing = await ask(stack, headers, model=None)
    assert missing.status_code == 400
    assert "other" not in missing.text


async def test_nobody_is_answered_by_a_model_the_key_is_not_for(
    stack: Stack, accounts: Accounts, tmp_path: Path
) -> None:
    stack.route(Routing(fallback=("other",)), OTHER, keys=True, home=tmp_path)
    stack.pool.failing = {"engine-mtp", "engine-plain"}
    assert (await ask(stack, await key(stack, accounts))).status_code == 200
    assert (await ask(stack, await key(stack, accounts, models=[MODEL]))).status_code == 503


async def test_each_scope_opens_its_own_doors(stack: Stack, accounts: Accounts) -> None:
    inference = await key(stack, accounts, scopes=["inference"])
    admin = await key(stack, accounts, scopes=["admin"])
    for path in ("/metrics", "/admin/teams"):
        assert (await stack.client.get(path, headers=inference)).status_code == 403
        assert (await stack.client.get(path, headers=admin)).status_code == 200
    assert (await ask(stack, admin)).status_code == 403


async def test_an_administrator_makes_a_key_that_works(stack: Stack, accounts: Accounts) -> None:
    admin = await key(stack, accounts, scopes=["admin"])
    body = {"team": "search", "name": "made"}
    made = await stack.client.post("/admin/keys", json=body, headers=admin)
    assert made.status_code == 201, made.text
    assert stack.app.teams is not None
    await stack.app.teams.refresh()
    assert (await ask(stack, {"x-api-key": made.json()["key"]})).status_code == 200
    too_large = await stack.client.post("/admin/keys", content=b" " * 70_000, headers=admin)
    assert too_large.status_code == 413


async def test_a_limit_is_told_with_the_usual_headers_and_anthropics_shape(
    stack: Stack, accounts: Accounts
) -> None:
    headers = await key(stack, accounts, limits=Limits(requests_per_minute=2))
    replies = [await ask(stack, headers) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert replies[0].headers["x-ratelimit-limit-requests"] == "2"
    assert replies[1].headers["x-ratelimit-remaining-requests"] == "0"
    error = replies[2].json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert 1 <= int(replies[2].headers["retry-after"]) <= 61
    body = {"model": MODEL, "max_tokens": 9, "messages": []}
    refused = await stack.client.post("/v1/messages", json=body, headers=headers)
    assert (refused.status_code, refused.json()["type"]) == (429, "error")
    # Another key of the team is not touched.
    assert (await ask(stack, await key(stack, accounts))).status_code == 200


async def test_a_slot_is_free_again_whatever_became_of_the_request(
    stack: Stack, accounts: Accounts
) -> None:
    headers = await key(stack, accounts, limits=Limits(concurrent_requests=1))
    assert (await ask(stack, headers)).status_code == 200
    stack.pool.failing = {"engine-mtp", "engine-plain"}
    assert (await ask(stack, headers)).status_code == 503
    stack.pool.failing = set()
    assert (await ask(stack, headers)).status_code == 200


def told(text: str, finish: str, output: int) -> bytes:
    """An event of vLLM's that tells the tokens so far."""
    return (
        f'data: {{"id":"c","choices":[{{"index":0,"text":"{text}","finish_reason":{finish}}}]'
        f',"usage":{{"prompt_tokens":3,"total_tokens":{3 + output},"completion_tokens":{output}}}}}'
        "\n\n"
    ).encode()


LAST = (
    b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":3,"total_tokens":5,'
    b'"completion_tokens":2}}\n\n'
)
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("asks", [{}, {"stream_options": {"include_usage": True}}])
async def test_tokens_are_charged_as_the_engine_tells_them_and_not_as_reserved(
    stack: Stack, accounts: Accounts, asks: dict[str, Any]
) -> None:
    headers = await key(stack, accounts, limits=Limits(tokens_per_minute=60))
    stack.engine.behave = events(told("a", "null", 1), told("b", '"length"', 2), LAST, DONE)
    for _ in range(2):
        reply = await ask(stack, headers, stream=True, max_tokens=50, **asks)
        assert reply.status_code == 200, reply.text
        assert stack.engine.request["stream_options"]["continuous_usage_stats"] is True
        assert reply.text.count('"usage"') == len(asks)
        assert reply.text.endswith(DONE.decode())
    # 10 tokens are used.
    assert (await ask(stack, headers, max_tokens=55)).status_code == 429


async def test_who_leaves_is_charged_what_came_until_then(stack: Stack, accounts: Accounts) -> None:
    headers = await key(stack, accounts, limits=Limits(tokens_per_minute=60))

    async def endless(send: Send) -> None:
        await start(send, "text/event-stream")
        await write(send, told("a", "null", 20))
        await asyncio.Event().wait()

    stack.engine.behave = endless
    body = {"model": MODEL, "prompt": "a", "max_tokens": 50, "stream": True}
    async with stack.client.stream("POST", COMPLETIONS, json=body, headers=headers) as reply:
        assert b'"usage"' not in await anext(reply.aiter_raw())
    await asyncio.wait_for(stack.engine.gone.wait(), PATIENCE_S)
    stack.engine.behave = events(LAST, DONE)
    # 23 of 60 tokens are used, as soon as the gateway has noticed.
    async with asyncio.timeout(PATIENCE_S):
        while (await ask(stack, headers, max_tokens=30)).status_code != 200:
            await asyncio.sleep(0.1)
    assert (await ask(stack, headers, max_tokens=40)).status_code == 429


async def usage(stack: Stack, headers: dict[str, str], by: str = "model") -> list[dict[str, Any]]:
    """What the caller's team has used, all of it stored."""
    assert stack.app.teams is not None
    await stack.app.teams.ledger.store()
    reply = await stack.client.get("/v1/usage", params={"by": by}, headers=headers)
    assert reply.status_code == 200, reply.text
    found: list[dict[str, Any]] = reply.json()["data"]
    return found


async def test_each_request_is_in_the_ledger_once_with_the_engines_tokens(
    stack: Stack, accounts: Accounts
) -> None:
    headers = await key(stack, accounts)
    stack.engine.behave = events(told("a", "null", 1), told("b", '"length"', 2), LAST, DONE)
    for _ in range(3):
        assert (await ask(stack, headers, stream=True)).status_code == 200
    stack.pool.failing = {"engine-mtp", "engine-plain"}
    assert (await ask(stack, headers)).status_code == 503
    (row,) = await usage(stack, headers)
    assert (row["group"], row["requests"], row["prompt_tokens"], row["output_tokens"]) == (
        MODEL,
        4,
        9,
        6,
    )


async def test_the_model_that_answered_is_charged_where_another_was_asked_for(
    stack: Stack, accounts: Accounts, tmp_path: Path
) -> None:
    stack.route(Routing(fallback=("other",)), OTHER, keys=True, home=tmp_path)
    headers = await key(stack, accounts)
    stack.pool.failing = {"engine-mtp", "engine-plain"}
    stack.engine.behave = events(told("b", '"length"', 2), LAST, DONE)
    assert (await ask(stack, headers, stream=True)).status_code == 200
    assert [row["group"] for row in await usage(stack, headers)] == ["other"]


async def test_what_never_ran_costs_no_tokens(stack: Stack, accounts: Accounts) -> None:
    headers = await key(stack, accounts, limits=Limits(tokens_per_minute=60))
    stack.pool.failing = {"engine-mtp", "engine-plain"}
    for _ in range(2):
        assert (await ask(stack, headers, max_tokens=50)).status_code == 503
