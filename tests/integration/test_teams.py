"""Keys on the real stack: asked for from one `up` to the next, and limits that the bank lends."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
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
    return stack.http.get("/v1/models", headers={"x-api-key": text}).status_code


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
