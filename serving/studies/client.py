"""A streaming client for the OpenAI API of any server.

Owns sending one request, reading its event stream and what was measured on the way:
tokens as the server counts them, times as the client sees them. Leaves load, prompts and
statistics to the studies, and retries to nobody: a failed request is a result.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self

import aiohttp

from serving.studies.sse import EventParser

KEPT_HEADERS = ("x-moe-serving-", "x-request-id", "retry-after")
# A stream may be long, but is never silent for minutes: loading happens before it.
CONNECT_WITHIN_S = 10.0
SILENT_FOR_S = 300.0
MAX_MESSAGE_CHARS = 2000


class ApiFailureError(RuntimeError):
    """The server refused, failed or cannot be reached; the text is the server's own.

    `status` is the HTTP status, None where the failure came without one: no
    connection, or an error in the middle of a stream.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Piece(NamedTuple):
    """A part of an answer, as it came."""

    text: str
    reasoning: bool = False


@dataclass(frozen=True, slots=True)
class Speculation:
    """What an engine drafted for one answer, as vLLM reports it per request."""

    accepted: int
    drafted: int
    acceptance_rate: float
    """accepted / drafted"""
    mean_acceptance_length: float
    """1 + accepted / drafts: tokens per step, the engine's own included"""


@dataclass(frozen=True, slots=True)
class Result:
    """One finished answer. Times in seconds; tokens from the server's `usage`."""

    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    """From sending the request to the first piece of text; nan where none came."""
    duration_s: float
    """From sending the request to the end of the reply."""
    finish_reason: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """`x-moe-serving-*` and `x-request-id`, names in lower case."""
    speculation: Speculation | None = None

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first: (duration - TTFT) / (tokens - 1)."""
        if self.completion_tokens < 2:
            return float("nan")
        return (self.duration_s - self.ttft_s) / (self.completion_tokens - 1)


class Stream:
    """One streamed request: iterate for its pieces, then read `result`."""

    def __init__(self, session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> None:
        self._session = session
        self._url = url
        self._body = body
        self._result: Result | None = None

    @property
    def result(self) -> Result:
        """The finished answer; raises RuntimeError before the stream was read to its end."""
        if self._result is None:
            raise RuntimeError("the stream has not been read to its end")
        return self._result

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Send the request and yield its text as it comes; raises ApiFailureError."""
        reading = _Reading()
        try:
            async with self._session.post(self._url, json=self._body) as reply:
                await _raise_for_refusal(reply)
                async for chunk in reply.content.iter_any():
                    for piece in reading.feed(chunk):
                        yield piece
                self._result = reading.result(reply.headers)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(self._url, error) from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ApiFailureError(
                f"{self._url} sent no stream of the OpenAI API: {error}"
            ) from error


class Client:
    """A connection to one server's API, `url` as in `http://127.0.0.1:8000/v1`.

    To be used in `async with`. `connections` bounds how many requests run at once.
    """

    def __init__(self, url: str, *, api_key: str | None = None, connections: int = 1024) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=self._connections),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_WITHIN_S, sock_read=SILENT_FOR_S
            ),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def chat(self, model: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> Stream:
        """A chat answer; `options` are the request's other fields."""
        return self._stream("/chat/completions", model, {"messages": messages, **options})

    def completion(self, model: str, prompt: str, **options: Any) -> Stream:
        """The continuation of a text; `options` are the request's other fields."""
        return self._stream("/completions", model, {"prompt": prompt, **options})

    async def models(self) -> list[str]:
        """The names of the models served, the server's first first; raises ApiFailureError."""
        url = f"{self._url}/models"
        try:
            async with self._open_session().get(url) as reply:
                await _raise_for_refusal(reply)
                return [str(card["id"]) for card in (await reply.json())["data"]]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(url, error) from error
        except (ValueError, LookupError, TypeError) as error:
            raise ApiFailureError(f"{url} sent no list of models: {error}") from error

    async def one_reply(self, model: str, prompt: str, **options: Any) -> float:
        """Ask for a completion in one piece, not streamed; returns the seconds it took."""
        body = {"model": model, "prompt": prompt, **options}
        url = f"{self._url}/completions"
        began = time.perf_counter()
        try:
            async with self._open_session().post(url, json=body) as reply:
                await _raise_for_refusal(reply)
                await reply.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(url, error) from error
        return time.perf_counter() - began

    def _stream(self, path: str, model: str, fields: Mapping[str, Any]) -> Stream:
        body = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **fields}
        return Stream(self._open_session(), self._url + path, body)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use the client in `async with`")
        return self._session


class _Reading:
    """The state of one stream while it is read."""

    def __init__(self) -> None:
        self._events = EventParser()
        self._began = time.perf_counter()
        self._first_at: float | None = None
        self._usage: Mapping[str, Any] = {}
        self._speculation: Mapping[str, Any] | None = None
        self._finish_reason: str | None = None
        self._done = False

    def feed(self, chunk: bytes) -> Iterator[Piece]:
        for data in self._events.feed(chunk):
            for piece in self._event(data):
                if not piece.text:
                    continue
                if self._first_at is None:
                    self._first_at = time.perf_counter()
                yield piece

    def _event(self, data: str) -> list[Piece]:
        if data == "[DONE]":
            self._done = True
            return []
        event = json.loads(data)
        if event.get("error"):
            raise ApiFailureError(error_text(event))
        self._usage = event.get("usage") or self._usage
        metrics = event.get("metrics") or {}
        self._speculation = metrics.get("speculative_decoding") or self._speculation
        pieces = []
        for choice in event.get("choices") or ():
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            delta = choice.get("delta") or {}
            reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
            text = choice.get("text") or delta.get("content") or ""
            pieces += [Piece(reasoning, reasoning=True), Piece(text)]
        return pieces

    def result(self, headers: Mapping[str, str]) -> Result:
        ended = time.perf_counter()
        if not self._done:
            raise ApiFailureError("the stream ended before its end mark: the server broke it off")
        if not self._usage:
            raise ApiFailureError("the server sent no usage, so its tokens cannot be counted")
        first = self._first_at
        return Result(
            prompt_tokens=self._usage["prompt_tokens"],
            completion_tokens=self._usage["completion_tokens"],
            ttft_s=float("nan") if first is None else first - self._began,
            duration_s=ended - self._began,
            finish_reason=self._finish_reason,
            headers={
                name.lower(): value
                for name, value in headers.items()
                if name.lower().startswith(KEPT_HEADERS)
            },
            speculation=_speculation(self._speculation),
        )


def _speculation(found: Mapping[str, Any] | None) -> Speculation | None:
    if found is None:
        return None
    return Speculation(
        accepted=found["num_accepted_draft_tokens"],
        drafted=found["num_draft_tokens"],
        acceptance_rate=found["draft_acceptance_rate"],
        mean_acceptance_length=found["mean_acceptance_length"],
    )


def error_text(body: Any) -> str:
    """The message in an error body of OpenAI's, Anthropic's or vLLM's shape."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return (message if isinstance(message, str) else json.dumps(message))[:MAX_MESSAGE_CHARS]


async def _raise_for_refusal(reply: aiohttp.ClientResponse) -> None:
    if reply.status == 200:
        return
    text = (await reply.content.read(64 * 1024)).decode(errors="replace")
    try:
        message = error_text(json.loads(text))
    except ValueError:
        message = text.strip()[:MAX_MESSAGE_CHARS] or str(reply.reason)
    raise ApiFailureError(f"{message} (HTTP {reply.status})", reply.status)


def _unreachable(url: str, error: BaseException) -> ApiFailureError:
    if isinstance(error, aiohttp.InvalidURL):
        return ApiFailureError(f"{url} is no URL; write it as http://127.0.0.1:8000/v1")
    if isinstance(error, aiohttp.ClientConnectorError):
        return ApiFailureError(f"nothing answers at {url}: {error.strerror or error}")
    if isinstance(error, TimeoutError):
        return ApiFailureError(f"{url} has been silent for {SILENT_FOR_S:.0f} s")
    return ApiFailureError(f"the connection to {url} broke: {error}")
