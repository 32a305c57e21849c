"""A streaming client for the OpenAI API of any server.

Owns what a request says, reading its event stream and what was measured on the way:
tokens as the server counts them, times as the client sees them. `Client` sends with asyncio;
who sends otherwise, as Locust does, takes a request from `prompt_request` and gives the bytes of
the reply to a `Reading`. Leaves load, prompts and statistics to the studies, and retries to
nobody: a failed request is a result.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import aiohttp

from serving.studies.prompts import Prompt
from serving.studies.sse import EventParser

KEPT_HEADERS = ("x-moe-serving-", "x-request-id", "retry-after")
# A stream may be long, but is never silent for minutes: loading happens before it.
CONNECT_WITHIN_S = 10.0
SILENT_FOR_S = 300.0
MAX_MESSAGE_CHARS = 2000
MAX_REFUSAL_BYTES = 64 * 1024
# Tokens named by id: two with the same text would be one entry of a completion's `top_logprobs`.
TOKEN_IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}
# What is not the text of a stream, or not of this API, shows as one of these.
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError)

Clock = Callable[[], float]
Failure = Literal["refused", "cut", "unreachable"]


class ApiFailureError(RuntimeError):
    """The server refused, failed or cannot be reached; the text is the server's own.

    `status` is the HTTP status, None where the failure came without one. `outcome` tells
    how far the request got: no reply (unreachable), a reply that says no (refused), or one
    that began as an answer and did not become a whole one (cut).
    """

    def __init__(
        self, message: str, status: int | None = None, *, outcome: Failure = "refused"
    ) -> None:
        super().__init__(message)
        self.status = status
        self.outcome: Failure = outcome


class Request(NamedTuple):
    """A streamed request: the path under `/v1`, and its body."""

    path: str
    body: dict[str, Any]


def chat_request(
    model: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    token_details: bool = False,
    **options: Any,
) -> Request:
    """A chat; `options` are the request's other fields.

    `token_details` asks for what fills `Result.token_ids` (vLLM only) and `logprob_gaps`.
    """
    details = {**TOKEN_IDS, "logprobs": True, "top_logprobs": 2} if token_details else {}
    return _streamed("/chat/completions", model, {"messages": messages, **details, **options})


def completion_request(
    model: str, prompt: str, *, token_details: bool = False, **options: Any
) -> Request:
    """The continuation of a text; otherwise as `chat_request`."""
    details = {**TOKEN_IDS, "logprobs": 2} if token_details else {}
    return _streamed("/completions", model, {"prompt": prompt, **details, **options})


def prompt_request(
    model: str, prompt: Prompt, *, token_details: bool = False, **options: Any
) -> Request:
    """What a prompt of a set asks, be it a chat or a text; otherwise as `chat_request`."""
    if prompt.response_format is not None:
        options = {**options, "response_format": prompt.response_format}
    if prompt.text is not None:
        return completion_request(model, prompt.text, token_details=token_details, **options)
    return chat_request(model, prompt.messages, token_details=token_details, **options)


def _streamed(path: str, model: str, fields: Mapping[str, Any]) -> Request:
    asked = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    return Request(path, {**asked, **fields})


class Piece(NamedTuple):
    """A part of an answer, as it came."""

    text: str
    reasoning: bool = False


@dataclass(frozen=True, slots=True)
class Speculation:
    """What an engine drafted for one answer, by its own count."""

    accepted: int
    drafted: int
    acceptance_rate: float
    """accepted / drafted"""
    mean_acceptance_length: float
    """1 + accepted / drafts: tokens per step, the engine's own included"""
    drafts: int = 0
    """Steps that drafted."""
    accepted_per_position: tuple[int, ...] | None = None
    """Accepted tokens by place in the draft; None where the engine does not tell."""


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
    chunks: int = 0
    """Stream events that carried text."""
    text: str = ""
    """The answer, reasoning included."""
    token_ids: tuple[int, ...] | None = None
    """One per token, or None."""
    logprob_gaps: tuple[float, ...] | None = None
    """Log-probability of the likeliest token minus the second's, one per token, or None."""

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first: (duration - TTFT) / (tokens - 1)."""
        if self.completion_tokens < 2:
            return float("nan")
        return (self.duration_s - self.ttft_s) / (self.completion_tokens - 1)


class Stream:
    """One streamed request: iterate for its pieces, then read `result`."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], clock: Clock
    ) -> None:
        self._session = session
        self._url = url
        self._body = body
        self._clock = clock
        self._result: Result | None = None

    @property
    def result(self) -> Result:
        """The finished answer; raises RuntimeError before the stream was read to its end."""
        if self._result is None:
            raise RuntimeError("the stream has not been read to its end")
        return self._result

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Send the request and yield its text as it comes; raises ApiFailureError."""
        reading = Reading(self._url, self._clock)
        answered = False
        try:
            async with self._session.post(self._url, json=self._body) as reply:
                await _raise_for_refusal(reply)
                answered = True
                async for chunk in reply.content.iter_any():
                    for piece in reading.feed(chunk):
                        yield piece
                self._result = reading.result(reply.headers)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _broken(self._url, error, "cut" if answered else "unreachable") from error


class Client:
    """A connection to one server's API, `url` as in `http://127.0.0.1:8000/v1`.

    To be used in `async with`. `connections` bounds how many requests run at once.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        connections: int = 1024,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._clock = clock
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

    def stream(self, request: Request) -> Stream:
        """The answer to `request`."""
        return Stream(self._open_session(), self._url + request.path, request.body, self._clock)

    def chat(self, model: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> Stream:
        """The answer to `chat_request` with the same arguments."""
        return self.stream(chat_request(model, messages, **options))

    def completion(self, model: str, prompt: str, **options: Any) -> Stream:
        """The answer to `completion_request` with the same arguments."""
        return self.stream(completion_request(model, prompt, **options))

    async def models(self) -> list[str]:
        """The names of the models served, the server's first first; raises ApiFailureError."""
        url = f"{self._url}/models"
        try:
            async with self._open_session().get(url) as reply:
                await _raise_for_refusal(reply)
                return [str(card["id"]) for card in (await reply.json())["data"]]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _broken(url, error, "unreachable") from error
        except UNREADABLE as error:
            raise ApiFailureError(f"{url} sent no list of models: {error}") from error

    async def one_reply(self, model: str, prompt: str, **options: Any) -> float:
        """Ask for a completion in one piece, not streamed; returns the seconds it took."""
        body = {"model": model, "prompt": prompt, **options}
        url = f"{self._url}/completions"
        began = self._clock()
        try:
            async with self._open_session().post(url, json=body) as reply:
                await _raise_for_refusal(reply)
                await reply.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _broken(url, error, "unreachable") from error
        return self._clock() - began

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use the client in `async with`")
        return self._session


class Reading:
    """The reply to one request while it is read; to be made as the request is sent.

    `url` stands in messages; `clock` gives seconds.
    """

    def __init__(self, url: str, clock: Clock = time.perf_counter) -> None:
        self._url = url
        self._clock = clock
        self._events = EventParser()
        self._began = clock()
        self._first_at: float | None = None
        self._chunks = 0
        self._text: list[str] = []
        self._tokens = _Tokens()
        self._usage: Mapping[str, Any] = {}
        self._speculation: Speculation | None = None
        self._finish_reason: str | None = None
        self._done = False

    def feed(self, chunk: bytes) -> Iterator[Piece]:
        """The text in the next bytes of the reply; raises ApiFailureError."""
        with self._of_the_api():
            for data in self._events.feed(chunk):
                pieces = [piece for piece in self._event(data) if piece.text]
                if pieces and self._first_at is None:
                    self._first_at = self._clock()
                self._chunks += bool(pieces)
                self._text += (piece.text for piece in pieces)
                yield from pieces

    def result(self, headers: Mapping[str, str]) -> Result:
        """What came; to be called at the end of the reply. Raises ApiFailureError for a part."""
        ended = self._clock()
        if not self._done:
            message = "the stream ended before its end mark: the server broke it off"
            raise ApiFailureError(message, outcome="cut")
        if not self._usage:
            message = "the server sent no usage, so its tokens cannot be counted"
            raise ApiFailureError(message, outcome="cut")
        with self._of_the_api():
            return self._whole(headers, ended)

    def _whole(self, headers: Mapping[str, str], ended: float) -> Result:
        first = self._first_at
        tokens = self._usage["completion_tokens"]
        return Result(
            prompt_tokens=self._usage["prompt_tokens"],
            completion_tokens=tokens,
            ttft_s=float("nan") if first is None else first - self._began,
            duration_s=ended - self._began,
            finish_reason=self._finish_reason,
            headers={
                name.lower(): value
                for name, value in headers.items()
                if name.lower().startswith(KEPT_HEADERS)
            },
            speculation=self._speculation,
            chunks=self._chunks,
            text="".join(self._text),
            token_ids=self._tokens.ids_of(tokens),
            logprob_gaps=self._tokens.gaps_of(tokens),
        )

    @contextmanager
    def _of_the_api(self) -> Iterator[None]:
        try:
            yield
        except UNREADABLE as error:
            message = f"{self._url} sent no stream of the OpenAI API: {error}"
            raise ApiFailureError(message, outcome="cut") from error

    def _event(self, data: str) -> list[Piece]:
        if data == "[DONE]":
            self._done = True
            return []
        event = json.loads(data)
        if event.get("error"):
            raise ApiFailureError(error_text(event), outcome="cut")
        self._usage = event.get("usage") or self._usage
        self._speculation = _speculation(event) or self._speculation
        pieces = []
        for choice in event.get("choices") or ():
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            self._tokens.add(choice)
            delta = choice.get("delta") or {}
            reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
            text = choice.get("text") or delta.get("content") or ""
            pieces += [Piece(reasoning, reasoning=True), Piece(text)]
        return pieces


class _Tokens:
    """What a request with `token_details` is told about each token."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._gaps: list[float] = []

    def add(self, choice: Mapping[str, Any]) -> None:
        self._ids += choice.get("token_ids") or ()
        logprobs = choice.get("logprobs") or {}
        # A completion has a mapping per token, a chat a list of objects.
        for top in logprobs.get("top_logprobs") or ():
            self._gap(top.values())
        for token in logprobs.get("content") or ():
            self._gap(each["logprob"] for each in token["top_logprobs"])

    def _gap(self, values: Iterable[float]) -> None:
        likeliest = sorted(values, reverse=True)[:2]
        if len(likeliest) == 2:
            self._gaps.append(likeliest[0] - likeliest[1])

    # Where one is missing, the others cannot be laid beside the tokens.
    def ids_of(self, tokens: int) -> tuple[int, ...] | None:
        return tuple(self._ids) if len(self._ids) == tokens else None

    def gaps_of(self, tokens: int) -> tuple[float, ...] | None:
        return tuple(self._gaps) if len(self._gaps) == tokens else None


def _speculation(event: Mapping[str, Any]) -> Speculation | None:
    found = (event.get("metrics") or {}).get("speculative_decoding")
    if found:
        return _of_vllm(found)
    timings = event.get("timings") or {}
    return _of_llama_server(timings) if timings.get("draft_n") else None


def _of_vllm(found: Mapping[str, Any]) -> Speculation:
    # [j] counts the steps that accepted j tokens; place i, from 0, is accepted where j > i.
    histogram = found["acceptance_histogram"]
    return Speculation(
        accepted=found["num_accepted_draft_tokens"],
        drafted=found["num_draft_tokens"],
        acceptance_rate=found["draft_acceptance_rate"],
        mean_acceptance_length=found["mean_acceptance_length"],
        drafts=found["num_spec_steps"],
        accepted_per_position=tuple(sum(histogram[i:]) for i in range(1, len(histogram))),
    )


def _of_llama_server(timings: Mapping[str, Any]) -> Speculation:
    accepted, drafted = timings["draft_n_accepted"], timings["draft_n"]
    # It does not count its drafts. The prompt gives the first token, and each step after it
    # one of its own; a step that drafted nothing is counted too.
    drafts = max(timings["predicted_n"] - 1 - accepted, 1)
    return Speculation(
        accepted=accepted,
        drafted=drafted,
        acceptance_rate=accepted / drafted,
        mean_acceptance_length=1 + accepted / drafts,
        drafts=drafts,
    )


def error_text(body: Any) -> str:
    """The message in an error body of OpenAI's, Anthropic's or vLLM's shape."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return (message if isinstance(message, str) else json.dumps(message))[:MAX_MESSAGE_CHARS]


async def _raise_for_refusal(reply: aiohttp.ClientResponse) -> None:
    if reply.status == 200:
        return
    body = await reply.content.read(MAX_REFUSAL_BYTES)
    raise refusal(reply.status, body, str(reply.reason))


def refusal(status: int, body: bytes, reason: str) -> ApiFailureError:
    """The failure that a reply with an HTTP status other than 200 is."""
    text = body.decode(errors="replace")
    try:
        message = error_text(json.loads(text))
    except ValueError:
        message = text.strip()[:MAX_MESSAGE_CHARS] or reason
    return ApiFailureError(f"{message} (HTTP {status})", status)


def _broken(url: str, error: BaseException, outcome: Failure) -> ApiFailureError:
    if isinstance(error, aiohttp.InvalidURL):
        message = f"{url} is no URL; write it as http://127.0.0.1:8000/v1"
    elif isinstance(error, aiohttp.ClientConnectorError):
        message = f"nothing answers at {url}: {error.strerror or error}"
    elif isinstance(error, TimeoutError):
        message = f"{url} has been silent for {SILENT_FOR_S:.0f} s"
    else:
        message = f"the connection to {url} broke: {error}"
    return ApiFailureError(message, outcome=outcome)
