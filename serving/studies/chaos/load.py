"""Clients of every kind at once, and what became of each of their requests.

Owns what is asked (whole replies and streams, chats and completions, short and long ones,
clients that leave, connections that are kept or not), and noticing how a request ended. No
request is repeated: a failure is a result. Leaves whose fault it was to `verdict`.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from serving.studies.client import error_text
from serving.studies.sse import EventParser

REPLICA_HEADER = "x-moe-serving-replica"
REQUEST_ID_HEADER = "x-request-id"
CONNECT_WITHIN_S = 5.0
# Longer than a hung engine takes to be given up and its requests to be answered elsewhere.
WITHIN_S = 150.0
SHORT_TOKENS, LONG_TOKENS = (4, 24), (100, 240)
STREAMED, LONG, CHAT, LEAVES, KEEPS_CONNECTION = 0.65, 0.5, 0.5, 0.12, 0.5
LEAVES_AFTER_S = 0.05, 1.5
# A refused client does not ask again at once.
AFTER_FAILURE_S = 0.3
PROMPTS = (
    "def moving_average(values, window):\n    total = 0\n",
    "import os\n\ndef largest_files(folder, count=10):\n",
    "class RetryPolicy:\n    def __init__(self, attempts=3):\n",
    "def merge_intervals(intervals):\n    if not intervals:\n",
)

Outcome = Literal["answered", "left", "failed"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What one request is."""

    id: str
    model: str
    path: str
    body: dict[str, Any]
    leaves_after_s: float | None
    """When the client goes away, seconds after sending; None where it stays."""
    keeps_connection: bool

    @property
    def streamed(self) -> bool:
        """Whether the answer comes as a stream."""
        return bool(self.body["stream"])


@dataclass(slots=True)
class Request:
    """One request and how it ended. Times are Unix seconds."""

    id: str
    model: str
    streamed: bool
    sent_at: float
    head_at: float | None = None
    """When status 200 was there: from then on the server cannot send it elsewhere."""
    ended_at: float = 0.0
    replica: str = ""
    outcome: Outcome = "failed"
    cause: str = ""
    """Of a failure, in words that are the same each time."""
    text: str = ""
    """Of a failure: the server's or the connection's own words."""
    longest_stall_s: float = 0.0
    """Between two events of the stream."""
    foreign: bool = False
    """Whether the answer was to another request, by its id."""


class Load:
    """The clients. `requests` has every request that has ended."""

    def __init__(self, url: str, models: Sequence[str], seed: int, run: str) -> None:
        """`url` is the gateway's, without /v1; `run` keeps ids apart from other runs' ones."""
        self._url = url
        self._models = models
        self._drawn = random.Random(seed)
        self._run = run
        self._number = 0
        self._stopping = False
        self.requests: list[Request] = []

    async def run(self, clients: int) -> None:
        """Ask, `clients` at a time, until `stop`; requests under way are finished."""
        timeout = aiohttp.ClientTimeout(total=WITHIN_S, sock_connect=CONNECT_WITHIN_S)
        connectors = [aiohttp.TCPConnector(limit=0, force_close=force) for force in (False, True)]
        async with (
            aiohttp.ClientSession(connector=connectors[0], timeout=timeout) as keeping,
            aiohttp.ClientSession(connector=connectors[1], timeout=timeout) as new,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(clients):
                group.create_task(self._client(keeping, new))

    def stop(self) -> None:
        """Send no further request."""
        self._stopping = True

    def next(self) -> Asked:
        """The next request; the same ones for the same seed."""
        drawn, model = self._drawn, self._models[self._number % len(self._models)]
        self._number += 1
        low, high = LONG_TOKENS if drawn.random() < LONG else SHORT_TOKENS
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": drawn.randint(low, high),
            "temperature": 0,
            "ignore_eos": True,
            "stream": drawn.random() < STREAMED,
        }
        prompt = f"# {self._run} {self._number}\n{drawn.choice(PROMPTS)}"
        chat = drawn.random() < CHAT
        body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        leaves = drawn.random() < LEAVES
        return Asked(
            id=f"chaos-{self._run}-{self._number}",
            model=model,
            path="/v1/chat/completions" if chat else "/v1/completions",
            body=body,
            leaves_after_s=drawn.uniform(*LEAVES_AFTER_S) if leaves else None,
            keeps_connection=drawn.random() < KEEPS_CONNECTION,
        )

    async def _client(self, keeping: aiohttp.ClientSession, new: aiohttp.ClientSession) -> None:
        while not self._stopping:
            asked = self.next()
            request = await send(keeping if asked.keeps_connection else new, self._url, asked)
            self.requests.append(request)
            if request.outcome == "failed":
                await asyncio.sleep(AFTER_FAILURE_S)


async def send(session: aiohttp.ClientSession, url: str, asked: Asked) -> Request:
    """Send one request and notice how it ends; never raises for what the server does."""
    request = Request(asked.id, asked.model, asked.streamed, sent_at=time.time())
    try:
        async with asyncio.timeout(asked.leaves_after_s):
            await _ask(session, url, asked, request)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        request.cause, request.text = "no connection", str(error)
    except TimeoutError:
        # The session's own limit is another one's: that of a client which stays.
        request.outcome = "left" if asked.leaves_after_s is not None else "failed"
        if request.outcome == "failed":
            request.cause = f"not answered within {WITHIN_S:.0f} s"
    except (aiohttp.ClientError, OSError) as error:
        broken = "connection broken in a reply" if request.head_at else "connection broken"
        request.cause, request.text = broken, f"{type(error).__name__}: {error}"
    except ValueError as error:
        request.cause, request.text = "unreadable reply", str(error)
    request.ended_at = time.time()
    return request


async def _ask(session: aiohttp.ClientSession, url: str, asked: Asked, request: Request) -> None:
    headers = {REQUEST_ID_HEADER: asked.id}
    async with session.post(url + asked.path, json=asked.body, headers=headers) as reply:
        request.replica = reply.headers.get(REPLICA_HEADER, "")
        if reply.status != 200:
            _refused(request, reply.status, await reply.read())
        elif asked.streamed:
            request.head_at = time.time()
            await _read_stream(reply, asked, request)
        else:
            # A whole reply's head comes with its end: until then it may be answered elsewhere.
            whole = json.loads(await reply.read())
            request.foreign = asked.id not in str(whole.get("id"))
            request.outcome = "answered"


def _refused(request: Request, status: int, body: bytes) -> None:
    text = body.decode(errors="replace")
    code = ""
    try:
        found = json.loads(text)
        text, code = error_text(found), _code(found)
    except ValueError:
        pass
    request.cause, request.text = f"HTTP {status} {code}".strip(), text


async def _read_stream(reply: aiohttp.ClientResponse, asked: Asked, request: Request) -> None:
    events, before, done = EventParser(), time.monotonic(), False
    async for chunk in reply.content.iter_any():
        for data in events.feed(chunk):
            now = time.monotonic()
            request.longest_stall_s = max(request.longest_stall_s, now - before)
            before = now
            if data == "[DONE]":
                done = True
                continue
            event = json.loads(data)
            if event.get("error"):
                request.cause = f"stream ended by {_code(event) or 'an error'}"
                request.text = error_text(event)
                return
            request.foreign |= asked.id not in str(event.get("id"))
    if done:
        request.outcome = "answered"
    else:
        request.cause = "stream without its end mark"


def _code(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("code") or error.get("type") or "") if isinstance(error, dict) else ""
