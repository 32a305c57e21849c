"""Requests that continue a response go where vLLM keeps it."""

from __future__ import annotations

import json

import pytest

from serving.gateway import kept
from serving.gateway.errors import response_out_of_reach
from serving.gateway.kept import Kept, KeptResponses
from serving.gateway.settings import GatewaySettings
from serving.router.balancing import Hint
from serving.router.table import RoutingTable
from tests.unit.gateway.harness import MODEL, TABLE, Stack, events, whole

RESPONSES = "/v1/responses"
PLAIN = Kept("plain", "replica-1")
CREATED = (
    b'event: response.created\ndata: {"response":{"id":"resp_2","object":"response"},'
    b'"sequence_number":0,"type":"response.created"}\n\n'
)
DONE = b'event: response.completed\ndata: {"response":{"id":"resp_2"}}\n\n'


@pytest.fixture
def keeping(stack: Stack) -> Stack:
    """A stack whose plain variant keeps responses and whose default one, mtp, does not."""
    model = TABLE.models[0]
    variants = tuple(
        each.model_copy(update={"keeps_responses": not each.drafts}) for each in model.variants
    )
    model = model.model_copy(update={"variants": variants})
    stack.app.use(GatewaySettings(table=RoutingTable(models=(model,))))
    stack.engine.behave = whole(b'{"id":"resp_1","output":[{"id":"msg_1"}]}')
    return stack


@pytest.mark.parametrize(
    ("first", "response_id"),
    [(b'{"id": "resp_1", "output": [{"id": "msg_1"}]}', "resp_1"), (CREATED, "resp_2")],
)
def test_the_id_is_the_first_of_a_whole_reply_or_of_a_stream(
    first: bytes, response_id: str
) -> None:
    responses = KeptResponses()
    responses.note(MODEL, PLAIN, first)
    assert responses.find(MODEL, response_id) == PLAIN
    assert responses.find("other", response_id) is None
    assert responses.find(MODEL, None) is None


def test_the_response_used_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_REMEMBERED", 2)
    responses = KeptResponses()
    for name in ("a", "b"):
        responses.note(MODEL, PLAIN, json.dumps({"id": name}).encode())
    assert responses.find(MODEL, "a") == PLAIN
    responses.note(MODEL, PLAIN, b'{"id": "c"}')
    assert responses.find(MODEL, "b") is None
    assert responses.find(MODEL, "a") == PLAIN


async def test_a_continuation_goes_to_the_variant_and_replica_that_hold_the_response(
    keeping: Stack,
) -> None:
    await keeping.ask(RESPONSES, model="tiny-moe@plain")
    response = await keeping.ask(RESPONSES, previous_response_id="resp_1")
    assert response.headers["x-moe-serving-variant"] == "plain"
    assert response.headers["x-moe-serving-route"] == "response"
    assert keeping.pool.hints == [Hint(), Hint(replica="replica-1")]
    assert keeping.engine.request["previous_response_id"] == "resp_1"


async def test_a_streamed_response_can_be_continued(keeping: Stack) -> None:
    keeping.engine.behave = events(CREATED, DONE)
    streamed = await keeping.ask(RESPONSES, model="tiny-moe@plain", stream=True)
    assert streamed.content == CREATED + DONE
    await keeping.ask(RESPONSES, previous_response_id="resp_2")
    assert keeping.pool.hints[-1] == Hint(replica="replica-1")


async def test_who_names_another_variant_gets_that_one(keeping: Stack) -> None:
    await keeping.ask(RESPONSES, model="tiny-moe@plain")
    await keeping.ask(RESPONSES, model="tiny-moe@mtp", previous_response_id="resp_1")
    assert (keeping.pool.leased[-1], keeping.pool.hints[-1]) == ("engine-mtp", Hint())


async def test_what_no_engine_keeps_is_not_remembered(keeping: Stack) -> None:
    await keeping.ask(RESPONSES)
    await keeping.ask(model="tiny-moe@plain")
    keeping.engine.behave = whole(b'{"error": {"id": "resp_1"}}', status=400)
    await keeping.ask(RESPONSES, model="tiny-moe@plain")
    response = await keeping.ask(RESPONSES, previous_response_id="resp_1")
    assert response.headers["x-moe-serving-route"] == "default"
    assert keeping.pool.hints[-1] == Hint()


async def test_a_replica_out_of_reach_is_told_in_openais_words(keeping: Stack) -> None:
    keeping.pool.failure = response_out_of_reach(MODEL)
    response = await keeping.ask(RESPONSES, previous_response_id="resp_1")
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (
        404,
        "previous_response_not_found",
        "previous_response_id",
    )
    assert "Send the conversation in input" in error["message"]


async def test_a_response_is_remembered_under_the_variant_that_answered(keeping: Stack) -> None:
    keeping.pool.failing = {"engine-mtp"}
    told = await keeping.ask(RESPONSES)
    assert told.headers["x-moe-serving-fallback"] == "tiny-moe@plain"
    response = await keeping.ask(RESPONSES, previous_response_id="resp_1")
    assert response.headers["x-moe-serving-route"] == "response"
    assert response.headers["x-moe-serving-variant"] == "plain"
    assert keeping.pool.hints[-1].replica == told.headers["x-moe-serving-replica"]
