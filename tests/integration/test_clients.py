"""The `openai` and `anthropic` clients work as against their own services."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.integration.harness import PROMPT, VARIANTS, RunningStack

MESSAGES: list[Any] = [{"role": "user", "content": "def add(a, b):"}]
OVER_THE_LIMIT = "x" * (1024 * 1024 + 1)


# --- openai ---------------------------------------------------------------------------


def test_openai_chat_answers_the_same_whole_and_streamed(openai_client: OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "tiny-moe",
        "messages": MESSAGES,
        "max_tokens": 32,
        "temperature": 0,
    }
    whole = openai_client.chat.completions.create(**options)
    chunks = list(
        openai_client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )

    assert whole.model == "tiny-moe"
    assert whole.choices[0].message.content
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == whole.choices[0].message.content
    assert len(chunks) > 3
    assert chunks[-1].usage == whole.usage
    finished = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert finished[-1] == whole.choices[0].finish_reason
    assert set(finished[:-1]) == {None}


def test_openai_completions_answer_the_same_whole_and_streamed(openai_client: OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "tiny-dense",
        "prompt": PROMPT,
        "max_tokens": 32,
        "temperature": 0,
    }
    whole = openai_client.completions.create(**options)
    chunks = list(openai_client.completions.create(**options, stream=True))

    assert whole.choices[0].text
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_openai_responses_answer_the_same_whole_and_streamed(openai_client: OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "tiny-moe",
        "input": PROMPT,
        "max_output_tokens": 32,
        "temperature": 0,
    }
    whole = openai_client.responses.create(**options)
    events = list(openai_client.responses.create(**options, stream=True))

    assert whole.output_text
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert [e.sequence_number for e in events] == list(range(len(events)))


def test_openai_lists_and_retrieves_models(openai_client: OpenAI) -> None:
    listed = [model.id for model in openai_client.models.list()]

    assert listed == [
        *("tiny-moe", "moe", "tiny-moe@mtp", "tiny-moe@plain"),
        *("tiny-dense", "dense", "tiny-dense@plain"),
    ]
    assert openai_client.models.retrieve("moe").id == "moe"
    with pytest.raises(openai.NotFoundError, match="tiny-moe"):
        openai_client.models.retrieve("tiny-mo")


def test_openai_raises_its_own_classes_of_errors(openai_client: OpenAI) -> None:
    create = openai_client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as unknown:
        create(model="gpt-4", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as refused:
        create(model="tiny-moe", messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.APIStatusError) as too_large:
        create(model="tiny-moe", messages=[{"role": "user", "content": OVER_THE_LIMIT}])

    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert "temperature" in refused.value.message
    assert too_large.value.status_code == 413
    assert unknown.value.request_id


def test_a_streamed_request_that_is_refused_raises_at_once(openai_client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        openai_client.completions.create(model="gpt-4", prompt=PROMPT, stream=True)
    with pytest.raises(openai.BadRequestError):
        openai_client.completions.create(
            model="tiny-moe", prompt=PROMPT, max_tokens=10**6, stream=True
        )


# --- anthropic ------------------------------------------------------------------------


def test_anthropic_messages_answer_the_same_whole_and_streamed(
    anthropic_client: Anthropic,
) -> None:
    options: dict[str, Any] = {
        "model": "tiny-moe",
        "messages": MESSAGES,
        "max_tokens": 32,
        # The client has no argument for it.
        "extra_body": {"temperature": 0},
    }
    whole = anthropic_client.messages.create(**options)
    with anthropic_client.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()

    assert whole.content[0].type == "text"
    assert whole.content[0].text
    assert text == whole.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == whole.stop_reason
    assert whole.stop_reason in ("max_tokens", "end_turn")


def test_anthropic_counts_the_tokens_that_a_message_uses(anthropic_client: Anthropic) -> None:
    counted = anthropic_client.messages.count_tokens(model="tiny-moe", messages=MESSAGES)
    answer = anthropic_client.messages.create(model="tiny-moe", messages=MESSAGES, max_tokens=1)

    assert counted.input_tokens == answer.usage.input_tokens > 0


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropic_errors_have_anthropics_shape(
    anthropic_client: Anthropic, streamed: bool
) -> None:
    def create(**fields: Any) -> None:
        body: dict[str, Any] = {"model": "tiny-moe", "messages": MESSAGES, "max_tokens": 8} | fields
        anthropic_client.messages.create(**body, stream=streamed)

    with pytest.raises(anthropic.NotFoundError) as unknown:
        create(model="claude")
    with pytest.raises(anthropic.BadRequestError) as refused:
        create(max_tokens=10**6)
    with pytest.raises(anthropic.APIStatusError) as too_large:
        create(messages=[{"role": "user", "content": OVER_THE_LIMIT}])

    assert _kind(unknown.value) == "not_found_error"
    assert "tiny-moe" in str(unknown.value)
    assert isinstance(_kind(refused.value), str)
    assert (too_large.value.status_code, _kind(too_large.value)) == (413, "request_too_large")


def _kind(error: anthropic.APIStatusError) -> object:
    assert isinstance(error.body, dict)
    assert error.body["type"] == "error"
    return error.body["error"]["type"]


# --- what has no client ---------------------------------------------------------------


@pytest.mark.parametrize("model", VARIANTS)
def test_tokens_come_back_as_the_text_they_were_made_of(stack: RunningStack, model: str) -> None:
    text = "for i in range(10):\n    print(i)\n"
    tokens = stack.tokens(model, prompt=text)
    reply = stack.post("/detokenize", {"model": model, "tokens": tokens})

    assert len(tokens) > 3
    assert reply.json()["prompt"] == text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "x"}),
        ("/score", {"text_1": "x", "text_2": "y"}),
        ("/v1/score", {"text_1": "x", "text_2": "y"}),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}),
    ],
)
def test_what_the_model_does_not_offer_is_refused_clearly(
    stack: RunningStack, path: str, body: dict[str, object]
) -> None:
    reply = stack.post(path, {"model": "tiny-moe", **body})

    assert reply.status_code == 404
    assert reply.json()["error"] == {
        "message": f"the model 'tiny-moe' does not offer {path}",
        "type": "not_found_error",
        "param": "model",
        "code": "not_offered",
    }


def test_images_are_refused_where_the_stack_file_allows_none(openai_client: OpenAI) -> None:
    picture: Any = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/cat.png"}}
    with pytest.raises(openai.BadRequestError):
        openai_client.chat.completions.create(
            model="tiny-moe", messages=[{"role": "user", "content": [picture]}]
        )


@pytest.mark.parametrize("model", VARIANTS)
def test_the_checkpoints_sampling_defaults_hold(stack: RunningStack, model: str) -> None:
    def text(**options: Any) -> str:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 64, "seed": 7, **options}
        said: str = stack.post("/v1/completions", body).json()["choices"][0]["text"]
        return said

    # What generation_config.json asks for; the API's own defaults would be 1 and 1.
    assert text() == text(temperature=0.7, top_p=0.95)
    assert text() != text(temperature=1, top_p=1)
