"""Keys on the real stack: asked for from one `up` to the next, and limits that the bank lends."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.integration.harness import PROMPT, SHORTER, RunningStack, wait_until


@pytest.fixture(scope="module", autouse=True)
def keys_needed(stack: RunningStack) -> Iterator[None]:
    result = stack.up(stack.changed("keys", {"access": "keys"}, dense=SHORTER))
    assert result.returncode == 0, result.stdout
    yield
    result = stack.up(stack.changed("open", dense=SHORTER))
    assert result.returncode == 0, result.stdout
    assert stack.answers("tiny-dense")


def key(stack: RunningStack, *options: str) -> str:
    """A new key of the team `search`, which the gateway knows."""
    stack.command("teams", "create", "search")
    made = stack.command("keys", "create", "--team", "search", "--name", "test", *options)
    assert made.returncode == 0, made.stdout
    (text,) = [line for line in made.stdout.splitlines() if line.startswith("msk_")]
    wait_until(lambda: status(stack, text) != 401, 30, "the gateway has read the key")
    return text


def status(stack: RunningStack, text: str) -> int:
    """Of a question with this key; 0 where nobody answers."""
    try:
        return stack.http.get("/v1/models", headers={"x-api-key": text}).status_code
    except httpx.HTTPError:
        return 0


def test_both_clients_send_the_key_and_are_let_in(stack: RunningStack) -> None:
    text = key(stack)
    with OpenAI(base_url=f"{stack.url}/v1", api_key=text, max_retries=0) as client:
        answer = client.completions.create(model="tiny-dense", prompt=PROMPT, max_tokens=4)
        assert answer.choices[0].text
    question: list[anthropic.types.MessageParam] = [{"role": "user", "content": PROMPT}]
    with Anthropic(base_url=stack.url, api_key=text, max_retries=0) as client:
        said = client.messages.create(model="tiny-dense", max_tokens=4, messages=question)
        assert said.content
    log = (stack.home / "up.log").read_text(errors="replace")
    assert text not in log


def test_who_has_no_key_is_refused_in_the_clients_own_words(stack: RunningStack) -> None:
    with (
        OpenAI(base_url=f"{stack.url}/v1", api_key="msk_wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
    assert stack.http.get("/readyz").status_code == 200


def test_a_limit_holds_and_is_told(stack: RunningStack) -> None:
    text = key(stack, "--rpm", "3")
    body = {"model": "tiny-dense", "prompt": PROMPT, "max_tokens": 2}
    headers = {"x-api-key": text}
    replies = [stack.post("/v1/completions", body, headers=headers) for _ in range(5)]
    assert [reply.status_code for reply in replies] == [200, 200, 200, 429, 429]
    assert replies[3].json()["error"]["code"] == "rate_limit_exceeded"
    assert int(replies[3].headers["retry-after"]) >= 1


def test_a_revoked_key_is_refused_and_who_revoked_it_is_noted(stack: RunningStack) -> None:
    admin, other = key(stack, "--scopes", "inference,admin"), key(stack)
    headers = {"x-api-key": admin}
    revoked = stack.http.post(f"/admin/keys/{other[4:12]}/revoke", headers=headers)
    assert revoked.status_code == 200, revoked.text
    wait_until(lambda: status(stack, other) == 401, 30, "the revoked key is refused")
    entries = stack.http.get("/admin/audit", headers=headers).json()["data"]
    assert any(entry["actor"] == admin[4:12] for entry in entries)


def used(stack: RunningStack, key_id: str) -> dict[str, int]:
    """What requests with this key used, as `moe-serving usage` adds it up."""
    printed = stack.command("usage", "--team", "search", "--by", "key", "--json").stdout
    rows = [row for row in json.loads(printed) if row["key"] == key_id]
    return rows[0] if rows else {"requests": 0}


def test_the_ledger_has_the_engines_own_tokens(stack: RunningStack) -> None:
    text = key(stack)
    engine = stack.engine("tiny-moe@mtp")
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    before = [engine.metric(name) for name in names]
    body = {"model": "tiny-moe@mtp", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    for streams in (True, False, True):
        reply = stack.post(
            "/v1/completions", {**body, "stream": streams}, headers={"x-api-key": text}
        )
        assert reply.status_code == 200
        assert ('"usage"' in reply.text) != streams
    wait_until(lambda: used(stack, text[4:12])["requests"] == 3, 30, "all are in the ledger")
    row = used(stack, text[4:12])
    prompt, output = (
        engine.metric(name) - value for name, value in zip(names, before, strict=True)
    )
    assert (row["prompt_tokens"], row["output_tokens"]) == (prompt, output)
    assert row["draft_tokens"] >= row["accepted_tokens"] > 0


def test_a_killed_gateway_loses_no_record_of_what_had_ended(stack: RunningStack) -> None:
    text = key(stack)
    body = {"model": "tiny-dense", "prompt": PROMPT, "max_tokens": 8, "stream": True}
    told = []
    with httpx.Client(base_url=stack.url, timeout=60, trust_env=False) as client:
        for _ in range(10):
            reply = client.post("/v1/completions", json=body, headers={"x-api-key": text})
            told.append(reply.status_code)
    stack.gateway_process().kill()
    assert told == [200] * 10
    wait_until(lambda: status(stack, text) == 200, 90, "the gateway is replaced")
    wait_until(lambda: used(stack, text[4:12])["requests"] == 10, 30, "all are in the ledger")
    assert used(stack, text[4:12])["output_tokens"] <= 80
