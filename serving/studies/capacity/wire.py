"""What goes over the wire: the requests of the load and the mock engine's replies.

Owns both sides, so that they agree. Shapes and sizes are those of vLLM 0.32's chat
completions: an event of a stream has 250 bytes, a whole reply of 64 tokens 800.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

MODEL = "mock"
PATH = "/v1/chat/completions"
PROMPT_BYTES = 1024
EVENT_MARK = b"data: "
EVENT_BYTES = 250
_ID = "chatcmpl-8d7f0f6d2c1f4b0e9a5b3c7d1e2f4a6b"
_CREATED = 1_780_000_000
# The pause has to survive every proxy, so it is part of the prompt.
_PAUSE = re.compile(rb"pause of (\d+) ms")
_MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
_STREAM = re.compile(rb'"stream": ?true')


@dataclass(frozen=True, slots=True)
class Asked:
    """One reply: how many chunks, how far apart, as a stream or whole."""

    chunks: int
    pause_ms: int
    stream: bool


def request_body(asked: Asked) -> bytes:
    """A chat request that asks the mock engine for this reply."""
    told = f"pause of {asked.pause_ms} ms. "
    prompt = told + "a b c d " * ((PROMPT_BYTES - len(told)) // 8)
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": asked.chunks,
        "temperature": 0,
        "stream": asked.stream,
    }
    return json.dumps(body).encode()


def read_request(body: bytes) -> Asked:
    """What a request asks for, however its JSON is spaced; one chunk at once where unsaid."""
    chunks, pause = _MAX_TOKENS.search(body), _PAUSE.search(body)
    return Asked(
        chunks=int(chunks[1]) if chunks else 1,
        pause_ms=int(pause[1]) if pause else 0,
        stream=_STREAM.search(body) is not None,
    )


def event(*, last: bool = False) -> bytes:
    """One event of a chat stream, `EVENT_BYTES` long unless it is the last chunk."""
    choice = {
        "index": 0,
        "delta": {"content": ""},
        "logprobs": None,
        "finish_reason": "stop" if last else None,
        "token_ids": None,
    }
    value = {
        "id": _ID,
        "object": "chat.completion.chunk",
        "created": _CREATED,
        "model": MODEL,
        "choices": [choice],
    }
    text = json.dumps(value, separators=(",", ":"))
    word = "x" * (EVENT_BYTES - len(EVENT_MARK) - 2 - len(text))
    return EVENT_MARK + text.replace('"content":""', f'"content":"{word}"').encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def whole_reply(chunks: int) -> bytes:
    """The same answer in one piece."""
    message = {"role": "assistant", "content": " word" * chunks, "tool_calls": []}
    usage = {"prompt_tokens": 256, "completion_tokens": chunks, "total_tokens": 256 + chunks}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    value = {
        "id": _ID,
        "object": "chat.completion",
        "created": _CREATED,
        "model": MODEL,
        "choices": [choice | {"stop_reason": None, "token_ids": None}],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage | {"prompt_tokens_details": None},
        "prompt_logprobs": None,
        "kv_transfer_params": None,
    }
    return json.dumps(value, separators=(",", ":")).encode()
