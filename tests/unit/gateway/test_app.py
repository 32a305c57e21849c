"""Routes, names, headers, limits and errors of the gateway's app."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from serving.engines.keys import Send
from serving.gateway import errors
from serving.gateway.app import RELAYED
from serving.gateway.leases import EngineState
from serving.router.balancing import Balancing, Hint
from serving.router.settings import Routing
from tests.unit.gateway.harness import COMPLETIONS, MODEL, Stack, whole


def openai_error(response: httpx.Response) -> tuple[int, str, str]:
    """Status, type and code of an error in OpenAI's shape."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["type"], error["code"]


async def connect(stack: Stack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A bare connection to the gateway."""
    return await asyncio.open_connection(stack.client.base_url.host, stack.client.base_url.port)


@pytest.mark.parametrize("path", sorted(RELAYED))
async def test_every_inference_path_reaches_the_engine(stack: Stack, path: str) -> None:
    response = await stack.ask(path)
    assert (response.status_code, response.content) == (200, b'{"id": "reply"}')
    assert stack.engine.paths == [path]


async def test_a_request_by_id_reaches_the_engine_byte_for_byte(stack: Stack) -> None:
    body = b'{ "max_tokens":1e1,"model" : "tiny-moe", "x": [1.50, "\\u00e9"]}'
    await stack.client.post(COMPLETIONS, content=body)
    assert stack.engine.bodies == [body]


@pytest.mark.parametrize(
    ("name", "header", "application"),
    [
        ("tiny-moe", {}, "engine-mtp"),
        ("chat", {}, "engine-mtp"),
        ("tiny-moe@plain", {}, "engine-plain"),
        ("chat@plain", {}, "engine-plain"),
        ("chat", {"x-moe-serving-variant": "plain"}, "engine-plain"),
    ],
)
async def test_an_alias_or_variant_becomes_the_id_and_nothing_else_changes(
    stack: Stack, name: str, header: dict[str, str], application: str
) -> None:
    body = {"model": name, "prompt": "é", "max_tokens": 3, "temperature": 0.0}
    response = await stack.client.post(COMPLETIONS, json=body, headers=header)
    assert response.status_code == 200
    assert stack.engine.request == {**body, "model": MODEL}
    assert stack.pool.leased == [application]


async def test_a_reply_says_which_variant_and_replica_answered(stack: Stack) -> None:
    response = await stack.ask(model="tiny-moe@plain")
    assert response.headers["x-moe-serving-variant"] == "plain"
    assert response.headers["x-moe-serving-replica"] == "replica-1"
    assert float(response.headers["x-moe-serving-overhead-ms"]) >= 0


async def test_the_engine_gets_the_lease_and_the_key_but_no_credentials(stack: Stack) -> None:
    sent = {
        "authorization": "Bearer client-secret",
        "cookie": "client-secret",
        "x-api-key": "client-secret",
        "x-moe-serving-engine-key": "client-secret",
        "x-moe-serving-lease": "forged",
        "anthropic-version": "2023-06-01",
        "traceparent": "00-1-2-01",
    }
    await stack.client.post(COMPLETIONS, json={"model": MODEL}, headers=sent)
    received = stack.engine.headers[0]
    assert "client-secret" not in str(received)
    assert received["x-moe-serving-engine-key"] == "engine-secret"
    assert received["x-moe-serving-lease"] == "lease-1"
    assert received["anthropic-version"] == "2023-06-01"
    assert received["traceparent"] == "00-1-2-01"


async def test_a_plain_request_id_is_the_same_for_client_and_engine(stack: Stack) -> None:
    headers = {"x-request-id": "my-id_1.2:3"}
    response = await stack.client.post(COMPLETIONS, json={"model": MODEL}, headers=headers)
    assert response.headers.get_list("x-request-id") == ["my-id_1.2:3"]
    assert stack.engine.headers[0]["x-request-id"] == "my-id_1.2:3"


async def test_a_request_without_an_id_gets_one(stack: Stack) -> None:
    response = await stack.ask()
    (made,) = response.headers.get_list("x-request-id")
    assert len(made) >= 32
    assert stack.engine.headers[0]["x-request-id"] == made


async def test_an_id_that_is_no_plain_one_never_reaches_the_engine(stack: Stack) -> None:
    headers = {"x-request-id": "x" * 129}
    await stack.client.post(COMPLETIONS, json={"model": MODEL}, headers=headers)
    assert len(stack.engine.headers[0]["x-request-id"]) == 32


async def test_an_unknown_model_is_404_and_names_the_known_ones(stack: Stack) -> None:
    response = await stack.ask(model="tiny-mo")
    assert openai_error(response) == (404, "not_found_error", "model_not_found")
    assert response.json()["error"]["message"] == (
        "the model 'tiny-mo' is not served here (did you mean 'tiny-moe'?); served: chat, tiny-moe"
    )
    assert stack.pool.leased == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b"\xff", b"[" * 100_000])
async def test_a_body_that_is_no_json_object_is_400(stack: Stack, body: bytes) -> None:
    response = await stack.client.post(COMPLETIONS, content=body)
    assert openai_error(response) == (400, "invalid_request_error", "invalid_json")


@pytest.mark.parametrize("body", [{}, {"model": None}, {"model": 3}])
async def test_a_body_without_a_model_is_400(stack: Stack, body: dict[str, object]) -> None:
    response = await stack.client.post(COMPLETIONS, json=body)
    assert openai_error(response) == (400, "invalid_request_error", "model_missing")
    assert response.json()["error"]["message"] == (
        '"model" is missing or not a string; served: tiny-moe'
    )


async def test_a_priority_that_there_is_not_is_400_and_names_those_there_are(stack: Stack) -> None:
    headers = {"x-moe-serving-priority": "urgent"}
    response = await stack.client.post(COMPLETIONS, json={"model": MODEL}, headers=headers)
    assert openai_error(response) == (400, "invalid_request_error", "header_not_usable")
    assert response.json()["error"]["message"] == (
        "the header x-moe-serving-priority is 'urgent'; write interactive or batch"
    )


async def test_a_body_over_the_limit_is_413(stack: Stack) -> None:
    stack.use(max_body_bytes=100)
    response = await stack.client.post(COMPLETIONS, content=b"x" * 101)
    assert openai_error(response) == (413, "invalid_request_error", "request_too_large")
    assert response.json()["error"]["message"] == (
        "the request body is over this gateway's limit of 100 bytes "
        "(gateway.max_body_mib in the stack file)"
    )


async def test_a_body_of_exactly_the_limit_passes(stack: Stack) -> None:
    body = json.dumps({"model": MODEL}).encode()
    stack.use(max_body_bytes=len(body))
    assert (await stack.client.post(COMPLETIONS, content=body)).status_code == 200


async def test_a_body_in_chunks_over_the_limit_is_413_before_it_is_all_there(stack: Stack) -> None:
    stack.use(max_body_bytes=100)
    reader, writer = await connect(stack)
    writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n".encode())
    writer.write(b"Transfer-Encoding: chunked\r\n\r\n" + b"65\r\n" + b"x" * 101 + b"\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b'"code": "request_too_large"' in await reader.readuntil(b"}}")
    writer.close()


async def test_a_client_that_waits_to_be_told_to_continue_is_told(stack: Stack) -> None:
    body = json.dumps({"model": MODEL}).encode()
    reader, writer = await connect(stack)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\nExpect: 100-continue\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
    writer.close()


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/invocations", "/v1/completions/", "/reset_prefix_cache", "/healthz/x"]
)
async def test_a_path_that_is_not_served_is_404(stack: Stack, path: str) -> None:
    response = await stack.client.post(path, json={"model": MODEL})
    assert openai_error(response) == (404, "not_found_error", "unknown_path")
    assert response.json()["error"]["message"] == f"POST {path} is not served here"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", COMPLETIONS, "POST"),
        ("OPTIONS", COMPLETIONS, "POST"),
        ("DELETE", "/v1/messages", "POST"),
        ("POST", "/healthz", "GET, HEAD"),
        ("PUT", "/v1/models/tiny-moe", "GET, HEAD"),
    ],
)
async def test_a_method_the_path_does_not_take_is_405_and_names_those_it_does(
    stack: Stack, method: str, path: str, allowed: str
) -> None:
    response = await stack.client.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    assert f"{path} takes {allowed}, not {method}" in response.text


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/v1/models", "/v1/models/chat"])
async def test_head_answers_like_get_without_the_body(stack: Stack, path: str) -> None:
    get, head = await stack.client.get(path), await stack.client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == get.headers["content-length"]


FAILURES = [
    (errors.no_capacity("m", 1.2), 429, "rate_limit_error", "rate_limit_error", "2"),
    (errors.engine_unavailable("m", "it loads", 10), 503, "server_error", "overloaded_error", "10"),
    (errors.engine_unfit("m", "a probe", 10), 503, "server_error", "overloaded_error", "10"),
    (errors.engine_died("m"), 503, "server_error", "overloaded_error", "5"),
    (errors.timed_out(3), 504, "server_error", "timeout_error", None),
    (RuntimeError("secret detail"), 500, "server_error", "api_error", None),
]


@pytest.mark.parametrize(("failure", "status", "openai", "anthropic", "retry_after"), FAILURES)
async def test_a_failure_has_its_status_and_the_shape_of_the_path(
    stack: Stack,
    failure: Exception,
    status: int,
    openai: str,
    anthropic: str,
    retry_after: str | None,
) -> None:
    stack.pool.failure = failure
    response = await stack.ask()
    assert openai_error(response)[:2] == (status, openai)
    assert response.headers.get("retry-after") == retry_after
    assert "secret detail" not in response.text

    response = await stack.ask("/v1/messages")
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (
        status,
        "error",
        anthropic,
    )
    assert set(body) == {"type", "error"} and set(body["error"]) == {"type", "message"}
    assert stack.pool.held == 0


async def test_a_request_that_waits_too_long_for_a_lease_is_504(stack: Stack) -> None:
    stack.use(request_timeout_s=0.05)
    stack.pool.free.clear()
    response = await stack.ask()
    assert openai_error(response) == (504, "server_error", "timeout")
    assert stack.pool.held == 0


async def test_an_engine_that_cannot_be_reached_is_503(stack: Stack) -> None:
    # Port 1 of the loopback address has no listener.
    stack.pool.url = "http://127.0.0.1:1"
    response = await stack.ask()
    assert openai_error(response) == (503, "server_error", "engine_died")
    assert (response.headers["retry-after"], stack.pool.held) == ("5", 0)


@pytest.mark.parametrize("status", [400, 401, 422, 429])
async def test_the_engines_own_refusals_pass_unchanged(stack: Stack, status: int) -> None:
    body = b'{"error":{"message":"max_tokens is too large","code":400}}'
    stack.engine.behave = whole(body, status=status)
    response = await stack.ask()
    assert (response.status_code, response.content) == (status, body)


async def test_the_engines_own_404_passes_unchanged(stack: Stack) -> None:
    body = b'{"error": {"message": "no such adapter"}}'
    stack.engine.behave = whole(body, status=404)
    response = await stack.ask()
    assert (response.status_code, response.content) == (404, body)


@pytest.mark.parametrize("status", [404, 405])
async def test_what_the_model_does_not_offer_is_said_with_its_name(
    stack: Stack, status: int
) -> None:
    stack.engine.behave = whole(b'{"detail":"Not Found"}', status=status)
    response = await stack.ask("/v1/embeddings")
    assert openai_error(response) == (404, "not_found_error", "not_offered")
    assert response.json()["error"]["message"] == (
        "the model 'tiny-moe' does not offer /v1/embeddings"
    )


@pytest.mark.parametrize(
    ("status", "body"),
    [(500, b'{"error": {"type": "EngineDeadError"}}'), (502, b""), (503, b"x" * 200_000)],
)
async def test_a_dead_engines_refusal_is_503_with_a_time_to_retry(
    stack: Stack, status: int, body: bytes
) -> None:
    stack.engine.behave = whole(body, status=status)
    response = await stack.ask()
    assert openai_error(response) == (503, "server_error", "engine_died")
    assert response.headers["retry-after"] == "5"


async def test_an_engines_bare_500_gets_a_shape(stack: Stack) -> None:
    stack.engine.behave = whole(b"Internal Server Error", "text/plain", status=500)
    response = await stack.ask()
    assert openai_error(response) == (500, "server_error", "engine_error")
    body = b'{"error": {"message": "of the engine\'s own"}}'
    stack.engine.behave = whole(body, status=500)
    assert (await stack.ask()).content == body


async def test_models_lists_every_name_with_what_stands_behind_it(stack: Stack) -> None:
    cards = (await stack.client.get("/v1/models")).json()["data"]
    assert [(card["id"], card["variant"]) for card in cards] == [
        ("tiny-moe", "mtp"),
        ("chat", "mtp"),
        ("tiny-moe@mtp", "mtp"),
        ("tiny-moe@plain", "plain"),
    ]
    assert cards[0] == {
        "id": "tiny-moe",
        "object": "model",
        "created": 0,
        "owned_by": "moe-serving",
        "root": "tiny-moe",
        "max_model_len": 4096,
        "variant": "mtp",
        "speculative": {"method": "mtp", "num_speculative_tokens": 2},
        "ready": True,
    }


async def test_one_model_is_found_by_any_of_its_names(stack: Stack) -> None:
    card = (await stack.client.get("/v1/models/chat@plain")).json()
    assert (card["id"], card["root"], card["speculative"]) == ("chat@plain", "tiny-moe", None)
    response = await stack.client.get("/v1/models/other")
    assert openai_error(response) == (404, "not_found_error", "model_not_found")


async def test_readyz_says_which_variant_is_not_ready(stack: Stack) -> None:
    stack.pool.states = {
        "engine-mtp": EngineState(1, "RUNNING"),
        "engine-plain": EngineState(0, "DEPLOYING"),
    }
    response = await stack.client.get("/readyz")
    assert response.status_code == 503
    assert response.json() == {
        "ready": False,
        "variants": {"tiny-moe@mtp": "running", "tiny-moe@plain": "deploying"},
    }
    assert (await stack.client.get("/healthz")).json() == {"status": "alive"}


async def test_readyz_says_why_a_variant_is_not_fit_to_serve(stack: Stack) -> None:
    stack.pool.states = {
        "engine-mtp": EngineState(1, "RUNNING", "acceptance probe: accepted 0.000"),
        "engine-plain": EngineState(1, "RUNNING"),
    }
    response = await stack.client.get("/readyz")
    assert response.status_code == 503
    assert response.json() == {
        "ready": False,
        "variants": {"tiny-moe@mtp": "unfit", "tiny-moe@plain": "running"},
        "reasons": {"tiny-moe@mtp": "acceptance probe: accepted 0.000"},
    }


@pytest.mark.parametrize("state", [EngineState(0, "UNHEALTHY"), EngineState(1, "RUNNING", "why")])
async def test_another_variant_answers_for_one_that_takes_no_requests(
    stack: Stack, state: EngineState
) -> None:
    stack.pool.states = {"engine-mtp": state, "engine-plain": EngineState(1, "RUNNING")}
    response = await stack.ask()
    assert response.headers["x-moe-serving-variant"] == "plain"
    assert response.headers["x-moe-serving-route"] == "fallback"
    assert stack.pool.leased == ["engine-plain"]
    # Who names a variant gets that one, or is told.
    await stack.ask(model="tiny-moe@mtp")
    await stack.client.post(
        COMPLETIONS,
        json={"model": MODEL, "prompt": "a"},
        headers={"x-moe-serving-variant": "mtp"},
    )
    assert stack.pool.leased == ["engine-plain", "engine-mtp", "engine-mtp"]


async def test_the_router_chooses_by_what_runs_and_the_reply_says_why(stack: Stack) -> None:
    stack.route(Routing(crossover_streams={"mtp": 1}, dwell_s=0))
    stack.pool.free.clear()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(stack.ask())
        await stack.pool.asked.wait()
        second = group.create_task(stack.ask())
        while len(stack.pool.leased) < 2:
            await asyncio.sleep(0.01)
        stack.pool.free.set()
    replies = [task.result().headers for task in (first, second)]
    assert [reply["x-moe-serving-variant"] for reply in replies] == ["mtp", "plain"]
    assert replies[1]["x-moe-serving-route"] == "load"
    # Nothing runs any more.
    third = await stack.ask()
    assert third.headers["x-moe-serving-variant"] == "mtp"


@pytest.mark.parametrize(
    ("balancing", "hint"),
    [
        ("power-of-two", Hint()),
        ("prefix-aware", Hint(prompt="a")),
        ("session-hash", Hint(session="s-1")),
    ],
)
async def test_a_lease_is_asked_for_with_what_the_models_balancing_looks_at(
    stack: Stack, balancing: Balancing, hint: Hint
) -> None:
    stack.route(Routing(balancing=balancing))
    body = {"model": MODEL, "prompt": "a"}
    await stack.client.post(COMPLETIONS, json=body, headers={"x-session-id": "s-1"})
    assert stack.pool.hints == [hint]


async def test_outcomes_are_counted_by_model_and_variant(stack: Stack) -> None:
    await stack.ask()
    stack.pool.failure = errors.no_capacity("m", 1)
    await stack.ask(model="tiny-moe@plain")
    metrics = await stack.metrics()
    labels = 'model="tiny-moe",outcome="{}",variant="{}"'
    assert f"moe_serving_requests_total{{{labels.format(200, 'mtp')}}} 1.0" in metrics
    assert f"moe_serving_requests_total{{{labels.format(429, 'plain')}}} 1.0" in metrics
    assert 'moe_serving_leases{model="tiny-moe",variant="mtp"} 0.0' in metrics


async def test_a_browser_of_a_listed_origin_may_call_and_read_our_headers(stack: Stack) -> None:
    stack.use(cors_origins=("https://ui.example",))
    origin = {"origin": "https://ui.example"}
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    preflight = await stack.client.options(COMPLETIONS, headers=origin | asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://ui.example"
    assert preflight.headers["access-control-allow-methods"] == "GET, HEAD, POST"
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"

    response = await stack.client.post(COMPLETIONS, json={"model": MODEL}, headers=origin)
    assert response.headers["access-control-allow-origin"] == "https://ui.example"
    assert response.headers["access-control-expose-headers"] == (
        "x-moe-serving-variant, x-moe-serving-route, x-moe-serving-replica, "
        "x-moe-serving-fallback, x-moe-serving-retries, x-moe-serving-overhead-ms, "
        "x-request-id, retry-after, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
        "x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, "
        "x-ratelimit-reset-tokens"
    )
    failed = await stack.client.post(COMPLETIONS, content=b"{", headers=origin)
    assert failed.headers["access-control-allow-origin"] == "https://ui.example"


async def test_another_origin_is_refused_and_probes_answer_as_ever(stack: Stack) -> None:
    stack.use(cors_origins=("https://ui.example",))
    headers = {"origin": "https://other.example", "access-control-request-method": "POST"}
    preflight = await stack.client.options(COMPLETIONS, headers=headers)
    assert preflight.status_code == 400
    assert "access-control-allow-origin" not in preflight.headers

    probe = await stack.client.get("/healthz")
    assert (probe.status_code, probe.json()) == (200, {"status": "alive"})
    assert not [name for name in probe.headers if name.startswith("access-control")]


async def test_without_the_setting_no_origin_may_call(stack: Stack) -> None:
    headers = {"origin": "https://ui.example"}
    response = await stack.client.post(COMPLETIONS, json={"model": MODEL}, headers=headers)
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("access-control")]


async def test_a_gateway_that_holds_as_many_requests_as_it_may_says_when_to_retry(
    stack: Stack,
) -> None:
    stack.use(max_ongoing_requests=1)
    answer, go_on = whole(b"{}"), asyncio.Event()

    async def wait(send: Send) -> None:
        await go_on.wait()
        await answer(send)

    stack.engine.behave = wait
    first = asyncio.create_task(stack.ask())
    await stack.engine.busy.wait()
    refused = await stack.ask()
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "no_capacity")
    assert refused.headers["retry-after"] == "2"
    # What asks for nothing of an engine is answered as ever.
    assert (await stack.client.get("/v1/models")).status_code == 200
    go_on.set()
    assert (await first).status_code == 200
    assert (await stack.ask()).status_code == 200
