"""`usage` is right to the token, whoever drafts and however the reply is read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.integration.harness import CODE_PROMPTS, VARIANTS, RunningStack, sse_data

MESSAGES = [{"role": "user", "content": "class Stack:\n    def push(self, item):"}]
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def tokens_in(parts: list[dict[str, Any]]) -> list[int]:
    """The token ids that a reply, or all chunks of one, say they carry."""
    choices = [choice for part in parts for choice in part["choices"]]
    return [token for choice in choices for token in choice.get("token_ids") or []]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("model", VARIANTS)
@pytest.mark.parametrize("prompt", [{"prompt": CODE_PROMPTS[0]}, {"messages": MESSAGES}], ids=str)
def test_usage_counts_what_was_sent_and_said(
    stack: RunningStack, model: str, prompt: dict[str, Any], streamed: bool
) -> None:
    path = "/v1/completions" if "prompt" in prompt else "/v1/chat/completions"
    options = {"max_tokens": 50, "temperature": 0, "return_token_ids": True}
    reply = stack.post(
        path, {"model": model, **prompt, **options, **(WITH_USAGE if streamed else {})}
    )
    assert reply.status_code == 200, reply.text
    parts = sse_data(reply.text) if streamed else [reply.json()]
    usage, said = parts[-1]["usage"], tokens_in(parts)

    assert usage["prompt_tokens"] == len(stack.tokens(model, **prompt))
    assert usage["completion_tokens"] == len(said)
    assert usage["total_tokens"] == usage["prompt_tokens"] + len(said)
    finish = [c["finish_reason"] for part in parts for c in part["choices"]][-1]
    assert len(said) == 50 if finish == "length" else 0 < len(said) <= 50
    shown = said if finish == "length" else said[:-1]
    assert stack.post("/detokenize", {"model": model, "tokens": shown}).json()["prompt"] == "".join(
        choice["text"] if "text" in choice else _content(choice)
        for part in parts
        for choice in part["choices"]
    )


def _content(choice: dict[str, Any]) -> str:
    return (choice.get("message") or choice["delta"]).get("content") or ""


@pytest.mark.parametrize("model", VARIANTS)
def test_a_prompt_of_one_token_is_answered(stack: RunningStack, model: str) -> None:
    body = {"model": model, "prompt": "def", "max_tokens": 4, "ignore_eos": True}
    reply = stack.post("/v1/completions", body)
    assert reply.status_code == 200, reply.text
    usage = reply.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (1, 4)


@pytest.mark.parametrize("model", ["tiny-moe@mtp", "tiny-moe@plain"])
async def test_32_streams_at_once_complete_each_with_its_own_tokens(
    stack: RunningStack, model: str
) -> None:
    prompts = [f"{CODE_PROMPTS[i % len(CODE_PROMPTS)]} # {i}\n" for i in range(32)]
    async with AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:

        async def stream(prompt: str, length: int) -> list[dict[str, Any]]:
            chunks = await client.completions.create(
                model=model,
                prompt=prompt,
                max_tokens=length,
                temperature=0.7,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )
            return [chunk.model_dump() async for chunk in chunks]

        replies = await asyncio.gather(*(stream(p, 24 + i) for i, p in enumerate(prompts)))

    for i, (prompt, chunks) in enumerate(zip(prompts, replies, strict=True)):
        sent = stack.tokens(model, prompt=prompt)
        assert len(tokens_in(chunks)) == 24 + i
        assert chunks[0]["choices"][0]["prompt_token_ids"] == sent
        assert chunks[-1]["usage"]["completion_tokens"] == 24 + i
        assert chunks[-1]["usage"]["prompt_tokens"] == len(sent)
