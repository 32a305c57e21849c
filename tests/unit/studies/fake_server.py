"""A program with the shape of an OpenAI server: `python fake_server.py PORT [FAIL_AFTER]`.

Streams as many tokens as are asked for; after FAIL_AFTER streamed requests it answers 500.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from aiohttp import web

fail_after = float(sys.argv[2]) if len(sys.argv) > 2 else float("inf")
streamed = 0


async def complete(request: web.Request) -> web.StreamResponse:
    global streamed
    body: dict[str, Any] = await request.json()
    if not body.get("stream"):
        return web.json_response({"choices": [{"text": "x"}]})
    streamed += 1
    if streamed > fail_after:
        return web.json_response({"error": {"message": "out of order"}}, status=500)
    reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await reply.prepare(request)
    tokens = body["max_tokens"]
    for event in (
        *({"choices": [{"text": "x", "delta": {"content": "x"}}]} for _ in range(tokens)),
        {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": tokens}},
    ):
        await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    await reply.write(b"data: [DONE]\n\n")
    return reply


async def models(_: web.Request) -> web.StreamResponse:
    return web.json_response({"data": [{"id": "tiny"}, {"id": "tiny@plain"}]})


app = web.Application()
app.router.add_get("/v1/models", models)
app.router.add_post("/v1/chat/completions", complete)
app.router.add_post("/v1/completions", complete)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
