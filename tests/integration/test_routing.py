"""Names lead to the right engine, and every reply says which one answered."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.integration.harness import PROMPT, VARIANTS, RunningStack

MTP = {"method": "mtp", "num_speculative_tokens": 2}


def ask(stack: RunningStack, model: str, **headers: str) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    return stack.post("/v1/completions", body, headers=headers)


@pytest.mark.parametrize(
    ("name", "header", "model", "variant"),
    [
        ("tiny-moe", None, "tiny-moe", "mtp"),
        ("moe", None, "tiny-moe", "mtp"),
        ("tiny-moe@plain", None, "tiny-moe", "plain"),
        ("moe@plain", None, "tiny-moe", "plain"),
        ("tiny-moe", "plain", "tiny-moe", "plain"),
        ("tiny-moe@mtp", "plain", "tiny-moe", "mtp"),
        ("dense", None, "tiny-dense", "plain"),
    ],
)
def test_a_name_leads_to_its_variant(
    stack: RunningStack, name: str, header: str | None, model: str, variant: str
) -> None:
    headers = {"x-moe-serving-variant": header} if header else {}
    served_by = stack.engine(f"{model}@{variant}")
    before = served_by.metric("vllm:request_success_total")
    reply = ask(stack, name, **headers)

    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == model
    assert reply.headers["x-moe-serving-variant"] == variant
    assert served_by.metric("vllm:request_success_total") == before + 1


def test_two_models_give_their_own_texts(stack: RunningStack) -> None:
    texts = {name: ask(stack, name).json()["choices"][0]["text"] for name in ("moe", "dense")}

    assert texts["moe"] != texts["dense"]
    assert ask(stack, "dense").json()["choices"][0]["text"] == texts["dense"]


def test_an_unknown_variant_in_the_header_is_named(stack: RunningStack) -> None:
    reply = ask(stack, "tiny-moe", **{"x-moe-serving-variant": "fast"})

    assert reply.status_code == 404
    message = reply.json()["error"]["message"]
    assert message == "model 'tiny-moe' has no variant 'fast'; it has: mtp, plain"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_reply_names_its_variant_replica_and_overhead(
    stack: RunningStack, streamed: bool
) -> None:
    body = {"model": "tiny-moe", "prompt": PROMPT, "max_tokens": 4, "stream": streamed}
    reply = stack.post("/v1/completions", body)

    assert reply.headers["x-moe-serving-variant"] == "mtp"
    assert reply.headers["x-moe-serving-replica"]
    assert float(reply.headers["x-moe-serving-overhead-ms"]) >= 0
    assert len(reply.headers.get_list("x-request-id")) == 1
    replica = reply.headers["x-moe-serving-replica"]
    assert ask(stack, "tiny-moe").headers["x-moe-serving-replica"] == replica
    assert ask(stack, "tiny-moe@plain").headers["x-moe-serving-replica"] != replica


@pytest.mark.parametrize("name", ["tiny-moe", "gpt-4"])
def test_a_clients_own_request_id_comes_back_once(stack: RunningStack, name: str) -> None:
    reply = ask(stack, name, **{"x-request-id": "order-66.a"})

    assert reply.headers.get_list("x-request-id") == ["order-66.a"]


def test_two_requests_without_an_id_get_two(stack: RunningStack) -> None:
    first, second = (ask(stack, "tiny-moe").headers["x-request-id"] for _ in range(2))

    assert first != second


def test_an_id_that_is_no_plain_one_is_replaced(stack: RunningStack) -> None:
    sent = "a b<script>"
    (answered,) = ask(stack, "tiny-moe", **{"x-request-id": sent}).headers.get_list("x-request-id")

    assert answered
    assert answered != sent


def test_the_model_list_has_every_name_with_length_and_speculation(stack: RunningStack) -> None:
    listing = stack.http.get("/v1/models").json()
    shown = {
        card["id"]: (card["root"], card["variant"], card["max_model_len"], card["speculative"])
        for card in listing["data"]
    }

    assert listing["object"] == "list"
    assert all(card["ready"] for card in listing["data"])
    moe, dense = ("tiny-moe", "mtp", 4096, MTP), ("tiny-dense", "plain", 4096, None)
    assert shown == {
        "tiny-moe": moe,
        "moe": moe,
        "tiny-moe@mtp": moe,
        "tiny-moe@plain": ("tiny-moe", "plain", 4096, None),
        "tiny-dense": dense,
        "dense": dense,
        "tiny-dense@plain": dense,
    }


def test_health_readiness_and_metrics_answer(stack: RunningStack) -> None:
    counted = dict(model="tiny-moe", variant="plain", outcome="200")
    before = stack.metric("moe_serving_requests_total", **counted)
    stack.complete("tiny-moe@plain")

    assert stack.http.get("/healthz").json() == {"status": "alive"}
    assert stack.http.get("/readyz").json() == {
        "ready": True,
        "variants": dict.fromkeys(VARIANTS, "running"),
    }
    assert stack.metric("moe_serving_requests_total", **counted) == before + 1
    assert stack.metric("moe_serving_overhead_seconds_count", model="tiny-moe") > 0


def test_only_the_allowed_web_origin_may_call(stack: RunningStack) -> None:
    def preflight(origin: str) -> Any:
        headers = {"origin": origin, "access-control-request-method": "POST"}
        return stack.http.options("/v1/completions", headers=headers).headers

    allowed = "access-control-allow-origin"
    assert preflight("https://app.example")[allowed] == "https://app.example"
    assert allowed not in preflight("https://elsewhere.example")
