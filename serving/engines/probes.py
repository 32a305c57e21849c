"""Asks an engine a few questions before it takes requests: does it draft, is its text sane?

Owns the questions and the verdicts, over any server of the OpenAI API. Leaves which probes run,
and what follows from a failure, to the replica.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp

from serving.engines.drafting import Drafting
from serving.engines.probe_settings import Probes

# Greedy answers of this length: long enough to draft in, too short to fall into a loop.
ANSWER_TOKENS = 64
MAX_ASKED = 64
PROMPTS = (
    "def moving_average(values, window):\n    total = 0\n    result = []\n    for",
    "The lighthouse keeper wrote in his journal every evening. On the first day of winter he",
    "class RetryPolicy:\n    def __init__(self, attempts=3, delay=0.5):\n        self.attempts",
    "To make bread you need flour, water, salt and yeast. First, mix the flour and",
    "import os\n\ndef largest_files(folder, count=10):\n    sizes = []\n    for root, dirs",
    "The history of the railway begins with the mines, where wagons on wooden rails were",
)
# A prefix shorter than two hybrid blocks never hits (up to 4,288 tokens on 35B-A3B with an fp8
# KV cache); a sentence numbered anew is about 20 tokens.
PREFIX_TOKENS = 4608
FILLER = "Entry {number} of list {name}: the value was read, checked and put back in its place.\n"
FILLER_TOKENS = 20
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
ASKED_FOR_A_CALL = "What is the weather in Paris? Call the function get_weather."
# What a parser must not let through as text.
MARKUP = ("<tool_call>", "<function=", "</parameter>", "</tool_call>")


class ProbeError(RuntimeError):
    """An engine failed a probe; the text says which one, and what was found."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server of the OpenAI API, and what its model is called there."""

    url: str
    """Without /v1."""
    model: str
    headers: Mapping[str, str]
    max_model_len: int
    """Tokens of a prompt and its answer."""

    async def complete(self, session: aiohttp.ClientSession, prompt: str) -> str:
        """A greedy continuation of `prompt`; raises ProbeError where none comes."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            # Texts are measured in characters; a small vocabulary makes more tokens of them.
            "truncate_prompt_tokens": self.max_model_len - ANSWER_TOKENS,
        }
        async with session.post(f"{self.url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                text = (await reply.text())[:200]
                raise ProbeError(f"a completion failed with HTTP {reply.status}: {text}")
            found: str = (await reply.json())["choices"][0]["text"]
            return found

    async def chat(
        self, session: aiohttp.ClientSession, body: Mapping[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        """The `delta` of each event of a streamed chat; raises ProbeError where none comes."""
        asked = {"model": self.model, "stream": True, **body}
        async with session.post(f"{self.url}/v1/chat/completions", json=asked) as reply:
            if reply.status != 200:
                text = (await reply.text())[:200]
                raise ProbeError(f"a chat failed with HTTP {reply.status}: {text}")
            async for line in reply.content:
                if line.startswith(b"data:") and b"[DONE]" not in line:
                    for choice in json.loads(line[5:]).get("choices", ()):
                        yield choice["delta"]


async def run(probes: Probes, target: Target, read: Callable[[], Drafting]) -> str | None:
    """Why the engine is not fit to serve, in a sentence; None where every probe passed.

    `read` tells what the engine has drafted so far.
    """
    try:
        async with (
            asyncio.timeout(probes.within_s),
            aiohttp.ClientSession(headers=dict(target.headers)) as session,
        ):
            for name, probe in _chosen(probes, target, session, read):
                try:
                    await probe()
                except ProbeError as error:
                    return f"{name} probe: {error}"
    except TimeoutError:
        return f"the probes took longer than {probes.within_s:g} s (probes.within_s)"
    except (aiohttp.ClientError, LookupError, TypeError, ValueError) as error:
        return f"a probe's reply could not be read: {type(error).__name__}"
    return None


def _chosen(
    probes: Probes,
    target: Target,
    session: aiohttp.ClientSession,
    read: Callable[[], Drafting],
) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
    chosen: list[tuple[str, Callable[[], Awaitable[None]]]] = []
    accepts = partial(acceptance, target, session, read, probes)
    if probes.acceptance:
        chosen.append(("acceptance", partial(accepts, "")))
    if probes.long_context_tokens:
        before = filler("long", probes.long_context_tokens)
        chosen.append(("long-context", partial(accepts, before)))
    if probes.prefix:
        chosen.append(("prefix", partial(prefix, target, session)))
    if probes.tools:
        chosen.append(("tool-call", partial(tools, target, session)))
    return chosen


def filler(name: str, tokens: int) -> str:
    """About `tokens` tokens of English that differ from those of another `name`."""
    lines = range(tokens // FILLER_TOKENS + 1)
    return "".join(FILLER.format(number=number, name=name) for number in lines)


async def acceptance(
    target: Target,
    session: aiohttp.ClientSession,
    read: Callable[[], Drafting],
    probes: Probes,
    before: str,
) -> None:
    """Enough drafts are accepted, and not all: over code and prose, each after `before`."""
    began = read()
    found = Drafting()
    for number in range(MAX_ASKED):
        await target.complete(session, before + PROMPTS[number % len(PROMPTS)])
        found = read().since(began)
        if found.drafts >= probes.drafts:
            break
    if not found.drafts:
        raise ProbeError("nothing was drafted, although the variant has a speculative block")
    if found.acceptance < probes.min_acceptance:
        raise ProbeError(
            f"accepted {found}, below {probes.min_acceptance:g} (probes.min_acceptance): the MTP "
            "head was not loaded, was quantised with the rest, or belongs to another model"
        )
    if found.flat_near_one:
        raise ProbeError(f"accepted {found}, almost all at every place: the text goes in circles")


async def prefix(target: Target, session: aiohttp.ClientSession) -> None:
    """A prompt's answer is the same again after another prompt, out of the prefix cache.

    A difference can be rounding; one that shows in two of two tries, or an empty answer, is a
    poisoned cache (vLLM pull request 43650 and others).
    """
    tokens = min(PREFIX_TOKENS, target.max_model_len - 2 * ANSWER_TOKENS)
    differing = 0
    for attempt in range(2):
        one, other = (filler(f"{name}{attempt}", tokens) for name in "AB")
        first = await target.complete(session, one)
        await target.complete(session, other)
        again = await target.complete(session, one)
        if first and not again:
            raise ProbeError("the same prompt had an answer at first, and an empty one from cache")
        differing += first != again
        if not differing:
            return
    if differing == 2:
        raise ProbeError("the same prompt has another greedy answer once its prefix is cached")


async def tools(target: Target, session: aiohttp.ClientSession) -> None:
    """A streamed tool call is parsed: no markup in the text, arguments that are JSON.

    A model that does not call at all passes: that is its choice.
    """
    text, calls = "", dict[int, str]()
    body = {
        "messages": [{"role": "user", "content": ASKED_FOR_A_CALL}],
        "tools": [TOOL],
        "temperature": 0,
        "max_tokens": 512,
    }
    async for delta in target.chat(session, body):
        text += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            arguments = call.get("function", {}).get("arguments") or ""
            calls[call["index"]] = calls.get(call["index"], "") + arguments
    leaked = [mark for mark in MARKUP if mark in text]
    if leaked:
        raise ProbeError(f"the parser left {leaked[0]!r} in the text of a streamed tool call")
    for arguments in calls.values():
        try:
            json.loads(arguments)
        except ValueError:
            raise ProbeError(
                f"a streamed tool call has arguments that are no JSON: {arguments[:80]!r}"
            ) from None
