"""A program with the shape of an OpenAI server: `python fake_server.py PORT [FAIL_AFTER]`.

Streams as many tokens as are asked for; after FAIL_AFTER streamed requests it answers 500.
With `--chunks 3,1,2` it decodes as an engine that drafts: each number is a step, in turns, that
sends so many tokens in one chunk; one of them is the engine's own, the others accepted drafts of
as many as the largest step has. `--cut-every 3` breaks each third stream off after its first
chunk. The `replica` it names is the request's number, from 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import web

parser = argparse.ArgumentParser()
parser.add_argument("port", type=int)
parser.add_argument("fail_after", type=float, nargs="?", default=float("inf"))
parser.add_argument("--chunks", type=lambda text: [int(n) for n in text.split(",")], default=[1])
parser.add_argument("--cut-every", type=int, default=0)
parser.add_argument("--first-after", type=float, default=0, help="seconds before the first chunk")
parser.add_argument("--gap", type=float, default=0, help="seconds before each further chunk")
given = parser.parse_args()
streamed = 0


async def complete(request: web.Request) -> web.StreamResponse:
    global streamed
    body: dict[str, Any] = await request.json()
    if not body.get("stream"):
        return web.json_response({"choices": [{"text": "x"}]})
    streamed += 1
    number = streamed
    if number > given.fail_after:
        return web.json_response({"error": {"message": "out of order"}}, status=500)
    headers = {"content-type": "text/event-stream", "x-moe-serving-replica": str(number)}
    reply = web.StreamResponse(headers=headers)
    await reply.prepare(request)
    # A client may go away in the middle.
    with contextlib.suppress(ConnectionResetError):
        await stream(request, reply, number, body["max_tokens"])
    return reply


async def stream(request: web.Request, reply: web.StreamResponse, number: int, tokens: int) -> None:
    steps = list(steps_of(tokens))
    for place, step in enumerate(steps):
        await asyncio.sleep(given.gap if place else given.first_after)
        await send(reply, {"choices": [{"text": "x" * step, "delta": {"content": "x" * step}}]})
        if given.cut_every and number % given.cut_every == 0:
            assert request.transport is not None
            request.transport.close()
            return
    usage = {"prompt_tokens": 1, "completion_tokens": tokens}
    await send(reply, {"choices": [], "usage": usage, "metrics": metrics(steps)})
    await reply.write(b"data: [DONE]\n\n")


def steps_of(tokens: int) -> Iterator[int]:
    for step in itertools.cycle(given.chunks):
        yield min(step, tokens)
        tokens -= step
        if tokens <= 0:
            return


def metrics(steps: Sequence[int]) -> dict[str, Any]:
    n = max(given.chunks) - 1
    if not n:
        return {}
    accepted = sum(step - 1 for step in steps)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / len(steps),
            "draft_acceptance_rate": accepted / (n * len(steps)),
            "acceptance_histogram": [steps.count(j + 1) for j in range(n + 1)],
            "num_spec_steps": len(steps),
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": n * len(steps),
            "num_spec_tokens": n,
        }
    }


async def send(reply: web.StreamResponse, event: dict[str, Any]) -> None:
    await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def models(_: web.Request) -> web.StreamResponse:
    return web.json_response({"data": [{"id": "tiny"}, {"id": "tiny@plain"}]})


app = web.Application()
app.router.add_get("/v1/models", models)
app.router.add_post("/v1/chat/completions", complete)
app.router.add_post("/v1/completions", complete)
web.run_app(app, host="127.0.0.1", port=given.port, print=None)
