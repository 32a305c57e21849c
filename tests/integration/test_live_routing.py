"""Routing that changes on the running gateway: shadows, A/B studies, fallbacks."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.integration.harness import PROMPT, STACK, RunningStack, ended, wait_until

MODEL = "tiny-moe"


@pytest.fixture(autouse=True, scope="module")
def routing_as_before(stack: RunningStack) -> Iterator[None]:
    """The stack's own routing afterwards."""
    yield
    result = stack.up(stack.write("as-before", STACK))
    assert result.returncode == 0, result.stdout


def ask(stack: RunningStack, count: int) -> list[str]:
    """The variants that answered requests of as many sessions."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    variants = []
    for i in range(count):
        reply = stack.post("/v1/completions", body, headers={"x-session-id": f"session-{i}"})
        assert reply.status_code == 200, reply.text
        variants.append(reply.headers["x-moe-serving-variant"])
    return variants


def test_a_shadow_repeats_requests_and_counts_their_tokens(stack: RunningStack) -> None:
    shadow = {"shadow": {"variant": "plain", "share": 1.0}}
    result = stack.up(stack.changed("shadow", moe={"routing": shadow}))
    assert result.returncode == 0, result.stdout
    assert ask(stack, 5) == ["mtp"] * 5
    name, labels = "moe_serving_shadow_requests_total", {"model": MODEL, "variant": "plain"}
    wait_until(lambda: stack.metric(name, outcome="200", **labels) == 5, 30, "shadows end")
    assert stack.metric("moe_serving_shadow_output_tokens_total", **labels) == 5 * 8


def test_a_split_is_a_study_that_can_be_reported(stack: RunningStack) -> None:
    split = {"split": {"study": "live", "arms": ["mtp", "plain"], "share": 1.0}}
    result = stack.up(stack.changed("split", moe={"routing": split}))
    assert result.returncode == 0, result.stdout
    variants = ask(stack, 16)
    assert set(variants) == {"mtp", "plain"}
    records = stack.home / "splits" / "live" / "requests.jsonl"
    wait_until(
        lambda: records.exists() and len(records.read_text().splitlines()) == 16, 10, "records"
    )
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert [line["arm"] for line in lines] == variants
    report = stack.command("study", "report", records.parent)
    assert report.returncode == 0, report.stdout


def test_another_model_answers_while_an_engine_is_being_replaced(stack: RunningStack) -> None:
    fallback = {"fallback": ["tiny-moe@plain"]}
    result = stack.up(stack.changed("fallback", dense={"routing": fallback}))
    assert result.returncode == 0, result.stdout
    body = {"model": "tiny-dense", "prompt": PROMPT, "max_tokens": 8}
    assert "x-moe-serving-fallback" not in stack.post("/v1/completions", body).headers
    engine = stack.engine("tiny-dense@plain")
    engine.core.kill()
    for _ in range(10):
        reply = stack.post("/v1/completions", body)
        assert reply.status_code == 200, reply.text
        if "x-moe-serving-fallback" in reply.headers:
            break
    assert reply.headers["x-moe-serving-fallback"] == "tiny-moe@plain"
    assert reply.json()["model"] == "tiny-moe"
    named = stack.post("/v1/completions", {**body, "model": "tiny-dense@plain"})
    assert named.status_code == 503
    wait_until(lambda: ended(engine.replica), 60, "what is left of it is taken away")
    # A busy controller may take it for running until it has looked.
    wait_until(lambda: len(stack.engines("tiny-dense@plain")) == 1, 300, "it is replaced")
    running = {"tiny-dense@plain": "running"}
    wait_until(lambda: running.items() <= stack.readiness().items(), 60, "requests go to it")
