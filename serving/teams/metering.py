"""What a reply says of its own tokens, read as its bytes go by.

Owns asking an engine to tell them, and taking out again what the client did not ask for, so that
it gets the bytes it would have got anyway. Knows how vLLM 0.32 writes its replies; leaves sending
and receiving them to the gateway, and what becomes of the counts to the ledger.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ValidationError

_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
# How the last event of a stream looks that ended by itself, and each that has generated tokens.
_EVENTS = {
    "/v1/messages": (re.compile(rb"event: message_stop\n"), b"event: content_block_delta\n"),
    "/v1/responses": (re.compile(rb"event: response\.(?:completed|incomplete)\n"), b".delta\ndata"),
}
# Inside a string, quotation marks are escaped: these are keys, whatever a model writes.
_OBJECT = rb"\{[^{}]*+(?:\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\}[^{}]*+)*+\}"
_USAGE_KEY = b',"usage":{'
_USAGE = re.compile(rb',"usage":(%s)' % _OBJECT)
_DRAFTING = re.compile(rb'"speculative_decoding":(\{[^{}]*+\})')
_FINGERPRINT = re.compile(rb',"system_fingerprint":"(?:[^"\\]|\\.)*+"')
_CHOICE = re.compile(rb'"choices":\[\{"index":(\d+),.*?,"usage":(%s)' % _OBJECT)
_FINISH = b'"finish_reason":"'
_LAST = b'"choices":[]'
_END = b"\n\n"
_OPTIONS = {"include_usage": True, "continuous_usage_stats": True}
_ADDED = b',"stream_options":' + json.dumps(_OPTIONS).encode() + b"}"
# Longer than any usage and what may follow it; what is before is read and let go.
KEPT_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Asked:
    """What an engine was asked to tell in a stream, and what of it the client wants."""

    tells: bool = False
    """Whether each event tells its tokens and the last one all."""
    hide_each: bool = False
    """Whether the client is not to see the former."""
    hide_last: bool = False
    """Whether the client is not to see the latter; then it does not see the former either."""
    choices: int = 1
    """Of each prompt."""
    several: bool = False
    """Whether there may be more than one choice, each of which tells its own tokens."""


NOTHING = Asked()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one reply, as its engine counts them; None where it does not tell."""

    prompt_tokens: int | None = None
    """Cached ones included."""
    cached_tokens: int = 0
    output_tokens: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    complete: bool = False
    """Whether the reply ended by itself; otherwise the counts are those of what came."""
    exact: bool = True
    """False: the engine did not tell `output_tokens`, which are at least so many."""


class _StreamOptions(BaseModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Streaming(BaseModel):
    """The fields of a request that say how it is answered, read as leniently as vLLM does."""

    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    n: int | None = 1
    use_beam_search: bool | None = False


def ask_for_usage(path: str, request: Mapping[str, Any], body: bytes) -> tuple[bytes, Asked]:
    """The body of `request` that makes an engine tell its tokens, and what the client wants of it.

    `body` is `request` as JSON. It comes back as it is where there is nothing to ask for: replies
    that are not streamed tell by themselves, as do /v1/messages and /v1/responses at their end.
    """
    if path not in (_CHAT, _COMPLETIONS) or not request.get("stream"):
        return body, NOTHING
    try:
        read = _Streaming.model_validate(request)
    except ValidationError:
        return body, NOTHING  # The engine refuses it.
    if not read.stream or (read.use_beam_search and path == _COMPLETIONS):
        return body, NOTHING  # A beam search comes whole, as one event.
    given = read.stream_options
    last = given is not None and bool(given.include_usage)
    each = last and given is not None and bool(given.continuous_usage_stats)
    choices = read.n or 1
    several = choices > 1 or _prompts(request) > 1
    asked = Asked(True, not each, not last, choices, several)
    return (body if each else _with_options(request, body)), asked


def _with_options(request: Mapping[str, Any], body: bytes) -> bytes:
    # JSON has no such byte, but in UTF-16 and UTF-32.
    if "stream_options" in request or b"\0" in body:
        options = {**(request.get("stream_options") or {}), **_OPTIONS}
        return json.dumps({**request, "stream_options": options}).encode()
    # A long prompt need not be written anew.
    return body.rstrip().removesuffix(b"}") + _ADDED


def _prompts(request: Mapping[str, Any]) -> int:
    """How many prompts a request to /v1/completions may have."""
    counts = 0
    for name in ("prompt", "prompt_embeds"):
        value = request.get(name)
        if isinstance(value, list):
            counts += 1 if value and isinstance(value[0], int) else len(value)
        else:
            counts += value is not None
    return counts


class _Reader(Protocol):
    def feed(self, chunk: bytes) -> bytes: ...

    def rest(self) -> bytes: ...

    def usage(self) -> Usage: ...


class Meter:
    """The tokens of one reply, whose bytes are fed in order, in parts of any size."""

    def __init__(
        self, path: str, streamed: bool, asked: Asked, fingerprint: bytes | None = None
    ) -> None:
        """`streamed`: whether the reply is a stream of events.

        `fingerprint` is what `fingerprint` of an earlier reply of the same replica was. Without
        it, the first choice that ends is held back until all have.
        """
        self._reader: _Reader
        if streamed and asked.tells:
            self._reader = _Choices(asked, fingerprint)
        else:
            self._reader = _Tail(*_EVENTS.get(path, (None, b"")) if streamed else (None, b""))
        self.feed = self._reader.feed
        """Take the next bytes of the body; what the client gets of it, which may be nothing."""

    def rest(self) -> bytes:
        """What the client gets once there is no more; an event that never ended is left out."""
        return self._reader.rest()

    def usage(self) -> Usage:
        """The tokens of what was fed so far."""
        return self._reader.usage()

    @property
    def fingerprint(self) -> bytes | None:
        """What the engine calls itself; None as long as it is not known."""
        return self._reader.fingerprint if isinstance(self._reader, _Choices) else None


class _Tail:
    """A reply that is passed on as it is, of which only the end is kept."""

    def __init__(self, ending: re.Pattern[bytes] | None, delta: bytes) -> None:
        self._ending = ending
        self._delta = delta
        self._kept = bytearray()
        self._deltas = 0
        self._ended = False
        self._told: dict[str, Any] = {}
        self._drafting: dict[str, Any] = {}

    def feed(self, chunk: bytes) -> bytes:
        self._kept += chunk
        if len(self._kept) > 2 * KEPT_BYTES:
            self._let_go()
        return chunk

    def rest(self) -> bytes:
        return b""

    def usage(self) -> Usage:
        told, drafting = self._look()
        if self._ending is None:
            return _usage(told, drafting, complete=bool(told))
        if self._ending.search(self._kept) or self._ended:
            return _usage(told, drafting, complete=True)
        # Until then, replies of /v1/responses have what the client sent, which may look like it.
        prompt = _usage(told if self._delta.startswith(b"event") else {}, {}, complete=False)
        output = self._deltas + self._kept.count(self._delta)
        return Usage(prompt.prompt_tokens, prompt.cached_tokens, output, exact=False)

    def _look(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return _told(self._kept) or self._told, _drafting(self._kept) or self._drafting

    def _let_go(self) -> None:
        self._told, self._drafting = self._look()
        end = self._kept.rfind(_END, 0, -KEPT_BYTES)
        end = len(self._kept) - KEPT_BYTES if end < 0 else end + len(_END)
        if self._ending is not None:
            self._ended = self._ended or self._ending.search(self._kept) is not None
            self._deltas += self._kept.count(self._delta, 0, end)
        del self._kept[:end]


class _Choices:
    """A stream of completions whose every event tells, some of which the client is not to see."""

    def __init__(self, asked: Asked, fingerprint: bytes | None) -> None:
        self._asked = asked
        self.fingerprint = fingerprint
        self._begun = b""
        self._held = bytearray()
        self._told = b""
        self._by_choice: dict[int, bytes] = {}
        self._complete = False

    def feed(self, chunk: bytes) -> bytes:
        events = chunk
        if self._begun or not chunk.endswith(_END):
            begun, mark, self._begun = (self._begun + chunk).rpartition(_END)
            events = begun + mark
        if self._asked.several:
            self._by_choice.update((int(i), told) for i, told in _CHOICE.findall(events))
        # Backwards, as what is looked for is near the end of an event.
        at = events.rfind(_USAGE_KEY)
        if self._held or events.rfind(_FINISH) >= 0 or events[:at].endswith(_LAST):
            seen = self._end(events)
        else:
            seen = _without_usage(events, at) if self._asked.hide_each else chunk
            if at >= 0:
                self._told = events
        return seen if self._asked.hide_each else chunk

    def rest(self) -> bytes:
        held, self._held = bytes(self._held), bytearray()
        return self._shown(held)

    def usage(self) -> Usage:
        if self._complete or not self._by_choice:
            return _usage(_told(self._told), _drafting(self._told), complete=self._complete)
        told = {index: json.loads(of) for index, of in self._by_choice.items()}
        prompts = {index // self._asked.choices: of["prompt_tokens"] for index, of in told.items()}
        output = sum(of["completion_tokens"] for of in told.values())
        return Usage(sum(prompts.values()), output_tokens=output)

    def _end(self, events: bytes) -> bytes:
        """What the client sees of these events, among which one ends its choice or all."""
        if _USAGE_KEY in events:
            self._told = events
        if _LAST in events:
            self._complete = True
            found = _FINGERPRINT.search(events, events.index(_LAST))
            self.fingerprint = found.group() if found else b""
        self._held += events
        if self._asked.hide_last and self.fingerprint is None:
            # The event that ends a choice has to tell it, as it would without the last one.
            return self._before_finish()
        return self.rest()

    def _before_finish(self) -> bytes:
        end = self._held.rfind(_END, 0, self._held.find(_FINISH)) + len(_END)
        if end < len(_END):
            return b""
        before = bytes(self._held[:end])
        del self._held[:end]
        return self._shown(before)

    def _shown(self, events: bytes) -> bytes:
        return b"".join(self._event(event + _END) for event in events.split(_END)[:-1])

    def _event(self, event: bytes) -> bytes:
        if _LAST in event:
            return b"" if self._asked.hide_last else event
        if self._asked.hide_last and _FINISH in event:
            return _USAGE.sub(lambda _: self.fingerprint or b"", event)
        return _USAGE.sub(b"", event)


def _without_usage(events: bytes, at: int) -> bytes:
    """`events` without each one's usage, the last of which begins at `at`."""
    if at < 0:
        return events
    if events.find(_USAGE_KEY) < at:
        return _USAGE.sub(b"", events)
    # What the pattern does, in half the time.
    begin = at + len(_USAGE_KEY)
    end = events.find(b"}", begin)
    while (begin := events.find(b"{", begin, end) + 1) > 0:
        end = events.find(b"}", end + 1)
    return events[:at] + events[end + 1 :]


def _told(body: bytes | bytearray) -> dict[str, Any]:
    """The last usage in `body`; empty where there is none."""
    found = _USAGE.findall(body)
    return json.loads(found[-1]) if found else {}


def _drafting(body: bytes | bytearray) -> dict[str, Any]:
    found = _DRAFTING.findall(body)
    return json.loads(found[-1]) if found else {}


def _usage(told: Mapping[str, Any], drafting: Mapping[str, Any], *, complete: bool) -> Usage:
    """Usage by the names of OpenAI's, of Anthropic's and of the Responses API."""
    prompt = told.get("prompt_tokens", told.get("input_tokens"))
    details = told.get("prompt_tokens_details") or told.get("input_tokens_details") or {}
    cached = details.get("cached_tokens") or told.get("cache_read_input_tokens") or 0
    if "cache_read_input_tokens" in told:  # Anthropic's count of the prompt leaves these out.
        prompt += cached + (told.get("cache_creation_input_tokens") or 0)
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=told.get("completion_tokens", told.get("output_tokens")),
        draft_tokens=drafting.get("num_draft_tokens"),
        accepted_tokens=drafting.get("num_accepted_draft_tokens"),
        complete=complete,
    )
