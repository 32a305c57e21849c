"""What a reply says of its tokens, and that the client sees only what it asked for."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.teams.metering import KEPT_BYTES, NOTHING, Asked, Meter, Usage, ask_for_usage

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
FINGERPRINT = "vllm-0.32.0-\\1234"
FAKE = ',"usage":{"prompt_tokens":0,"total_tokens":0,"completion_tokens":0} "choices":[]'
DRAFTED = {"mean_acceptance_length": 2.5, "acceptance_histogram": [1, 2], "num_spec_steps": 3}
DRAFTED |= {"num_accepted_draft_tokens": 5, "num_draft_tokens": 8, "num_spec_tokens": 2}
FIRST, DONE = {"role": "assistant", "content": ""}, b"data: [DONE]\n\n"


def dumps(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


@dataclass(frozen=True)
class Stream:
    """A stream as vLLM writes it: `steps` has the choice and the number of tokens of each."""

    chat: bool = True
    steps: tuple[tuple[int, int, str], ...] = ((0, 2, "so"), (0, 3, ""), (0, 1, FAKE))
    choices: int = 1
    prompt: int = 7
    fingerprint: str | None = FINGERPRINT
    cached: int | None = 4
    reasons: bool = False
    drafting: dict[str, Any] | None = field(default_factory=lambda: DRAFTED)

    @property
    def path(self) -> str:
        return CHAT if self.chat else COMPLETIONS

    def body(self, *, last: bool, each: bool) -> bytes:
        """As answered to a request with these options."""
        return b"".join(self.events(last=last, each=each))

    def events(self, *, last: bool, each: bool) -> list[bytes]:
        output = [0] * self.choices
        ends = {choice: at for at, (choice, _, _) in enumerate(self.steps)}
        events = [self._first(i, each) for i in range(self.choices)] if self.chat else []
        for at, (choice, tokens, text) in enumerate(self.steps):
            output[choice] += tokens
            finish = "stop" if ends[choice] == at else None
            events.append(self._event(choice, text, finish, output[choice], last, each))
        return [*events, self._last(sum(output)), DONE] if last else [*events, DONE]

    def _head(self) -> dict[str, Any]:
        name = "chat.completion.chunk" if self.chat else "text_completion"
        return {"id": "x", "object": name, "created": 1, "model": "m"}

    def _usage(self, output: int) -> dict[str, Any]:
        total = self.prompt + output
        usage = {"prompt_tokens": self.prompt, "total_tokens": total, "completion_tokens": output}
        thought = {"reasoning_tokens": output} if self.reasons else None
        return usage | ({"completion_tokens_details": thought} if self.chat else {})

    def _first(self, choice: int, each: bool) -> bytes:
        value = self._head() | {"choices": [self._choice(choice, FIRST, None)]}
        value |= {"usage": self._usage(0)} if each else {}
        return b"data: " + dumps(value | {"prompt_token_ids": None, "prompt_text": None}) + b"\n\n"

    def _choice(self, index: int, said: object, finish: str | None) -> dict[str, Any]:
        name = "delta" if self.chat else "text"
        return {"index": index, name: said, "logprobs": None, "finish_reason": finish}

    def _event(
        self, choice: int, text: str, finish: str | None, output: int, last: bool, each: bool
    ) -> bytes:
        said = {"content": text} if self.chat else text
        value = self._head() | {"choices": [self._choice(choice, said, finish)]}
        if each:
            value["usage"] = self._usage(output)
        if finish and not last and self.fingerprint is not None:
            value["system_fingerprint"] = self.fingerprint
        return b"data: " + dumps(value) + b"\n\n"

    def _last(self, output: int) -> bytes:
        usage = {k: v for k, v in self._usage(output).items() if v is not None}
        if self.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        value = self._head() | {"choices": [], "usage": usage}
        value |= {"system_fingerprint": self.fingerprint} if self.fingerprint is not None else {}
        value |= {"metrics": {"speculative_decoding": self.drafting}} if self.drafting else {}
        return b"data: " + dumps(value) + b"\n\n"

    def counts(self) -> Usage:
        drafted = self.drafting or {}
        return Usage(
            self.prompt,
            self.cached or 0,
            sum(tokens for _, tokens, _ in self.steps),
            drafted.get("num_draft_tokens"),
            drafted.get("num_accepted_draft_tokens"),
            complete=True,
        )


def streams() -> st.SearchStrategy[Stream]:
    text = st.one_of(st.text(max_size=12), st.just(FAKE))

    def steps(choices: int) -> st.SearchStrategy[tuple[tuple[int, int, str], ...]]:
        step = st.tuples(st.integers(0, choices - 1), st.integers(0, 4), text)
        return st.lists(step, max_size=6).map(
            lambda some: (*some, *((i, 1, "") for i in range(choices)))
        )

    return st.integers(1, 3).flatmap(
        lambda choices: st.builds(
            Stream,
            chat=st.booleans(),
            steps=steps(choices),
            choices=st.just(choices),
            prompt=st.integers(1, 9999),
            fingerprint=st.none() | st.text(max_size=5),
            cached=st.none() | st.integers(0, 99),
            reasons=st.booleans(),
            drafting=st.none() | st.just(DRAFTED),
        )
    )


def parts(body: bytes, cuts: list[int]) -> list[bytes]:
    at = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    return [body[a:b] for a, b in pairwise(at) if a < b]


# However busy the machine is.
unhurried = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
CUTS = st.lists(st.integers(0, 10**6), max_size=12)


def metered(meter: Meter, chunks: list[bytes]) -> tuple[bytes, Usage]:
    seen = b"".join(meter.feed(chunk) for chunk in chunks)
    return seen + meter.rest(), meter.usage()


def asked_by(path: str, **fields: Any) -> tuple[dict[str, Any], Asked]:
    request = {"model": "m", "prompt": "a", **fields}
    body, asked = ask_for_usage(path, request, dumps(request))
    return json.loads(body), asked


BOTH = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_a_stream_is_asked_to_tell_its_usage(path: str, options: dict[str, Any] | None) -> None:
    body, asked = asked_by(path, stream=True, stream_options=options)
    assert body["stream_options"] == BOTH
    assert asked.hide_each
    assert asked.hide_last is not (options or {}).get("include_usage", False)


def test_a_request_without_options_is_not_written_anew() -> None:
    body, asked = ask_for_usage(CHAT, {"stream": True, "n": 1}, b'{"stream":true, "n": 1 } \n')
    assert body.startswith(b'{"stream":true, "n": 1 ')
    assert json.loads(body) == {"stream": True, "n": 1, "stream_options": BOTH}
    assert asked.hide_last


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32-le"])
def test_a_request_in_another_encoding_is_asked_too(encoding: str) -> None:
    request = {"stream": True, "prompt": "ü"}
    body, _ = ask_for_usage(COMPLETIONS, request, json.dumps(request).encode(encoding))
    assert json.loads(body) == {**request, "stream_options": BOTH}


@pytest.mark.parametrize("options", [{"include_usage": "false"}, {"include_usage": 0}])
@pytest.mark.parametrize("stream", [1, "true", "yes"])
def test_words_that_vllm_takes_for_true_or_false_hide_nothing(
    stream: object, options: dict[str, Any]
) -> None:
    body, asked = asked_by(CHAT, stream=stream, stream_options=options)
    assert body["stream_options"] == BOTH
    assert asked.hide_last


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {}),
        (CHAT, {"stream": False}),
        (CHAT, {"stream": "perhaps"}),
        (CHAT, {"stream": True, "stream_options": [1]}),
        (COMPLETIONS, {"stream": True, "use_beam_search": True}),
        (MESSAGES, {"stream": True}),
        (RESPONSES, {"stream": True}),
        ("/v1/embeddings", {"stream": True}),
    ],
)
def test_nothing_is_asked_where_there_is_nothing_to_ask(path: str, fields: dict[str, Any]) -> None:
    request = {"model": "m", **fields}
    body = dumps(request)
    same, asked = ask_for_usage(path, request, body)
    assert same is body
    assert asked is NOTHING


def test_a_client_that_wants_all_gets_its_chunks_as_they_are() -> None:
    stream = Stream()
    body, asked = asked_by(CHAT, stream=True, stream_options=BOTH)
    assert body["stream_options"] == BOTH
    meter = Meter(CHAT, True, asked)
    for chunk in parts(stream.body(last=True, each=True), [3, 50, 200, 201]):
        assert meter.feed(chunk) is chunk
    assert meter.rest() == b""
    assert meter.usage() == stream.counts()


@pytest.mark.parametrize(
    ("fields", "several"),
    [
        ({"n": 3}, True),
        ({"prompt": ["a", "b"]}, True),
        ({"prompt": [[1], [2]]}, True),
        ({"prompt_embeds": ["x"]}, True),
        ({"prompt": ["a"]}, False),
        ({"prompt": [1, 2, 3]}, False),
    ],
)
def test_several_choices_are_known_beforehand(fields: dict[str, Any], several: bool) -> None:
    assert asked_by(COMPLETIONS, stream=True, **fields)[1].several is several


def asked_for(stream: Stream, wants: str) -> Asked:
    options = {"all": BOTH, "last": {"include_usage": True}, "none": None}[wants]
    fields = {"stream": True, "stream_options": options, "n": stream.choices}
    return asked_by(stream.path, **fields)[1]


@unhurried
@given(stream=streams(), wants=st.sampled_from(["none", "last", "all"]), cuts=CUTS, knows=...)
def test_a_client_sees_what_it_would_have_seen_however_the_stream_is_split(
    stream: Stream, wants: str, cuts: list[int], knows: bool
) -> None:
    told = stream.body(last=True, each=True)
    asked = asked_for(stream, wants)
    first = Meter(stream.path, True, asked)
    metered(first, [told])
    meter = Meter(stream.path, True, asked, first.fingerprint if knows else None)
    seen, usage = metered(meter, parts(told, cuts))
    assert seen == stream.body(last=wants != "none", each=wants == "all")
    assert usage == stream.counts()


def test_every_single_split_gives_the_same() -> None:
    stream = Stream(choices=2, steps=((0, 1, "a"), (1, 2, FAKE), (1, 1, "")), fingerprint='"\\')
    told, asked = stream.body(last=True, each=True), asked_for(stream, "none")
    for at in range(len(told)):
        seen, usage = metered(Meter(CHAT, True, asked), [told[:at], told[at:]])
        assert seen == stream.body(last=False, each=False)
        assert usage == stream.counts()


@unhurried
@given(stream=streams(), wants=st.sampled_from(["none", "last", "all"]), cuts=CUTS, data=st.data())
def test_a_cut_stream_is_charged_what_came(
    stream: Stream, wants: str, cuts: list[int], data: st.DataObject
) -> None:
    events = stream.events(last=True, each=True)
    roles = stream.choices if stream.chat else 0
    came = data.draw(st.integers(roles + 1, len(events) - 2))
    begun = events[came][: data.draw(st.integers(0, len(events[came]) - 2))]
    asked = asked_for(stream, wants)
    _, usage = metered(
        Meter(stream.path, True, asked), parts(b"".join(events[:came]) + begun, cuts)
    )
    steps = stream.steps[: came - roles]
    assert usage == Usage(stream.prompt, output_tokens=sum(tokens for _, tokens, _ in steps))


def test_a_stream_that_is_going_on_tells_what_there_is_so_far() -> None:
    stream = Stream()
    meter = Meter(CHAT, True, asked_for(stream, "none"))
    outputs = []
    for event in stream.events(last=True, each=True):
        meter.feed(event)
        outputs.append(meter.usage().output_tokens)
    assert outputs == [0, 2, 5, 6, 6, 6]


def test_nothing_is_held_back_but_the_end() -> None:
    stream = Stream()
    meter = Meter(CHAT, True, asked_for(stream, "none"))
    seen = [meter.feed(event) for event in stream.events(last=True, each=True)]
    assert [bool(part) for part in seen] == [True, True, True, False, True, True]
    known = Meter(CHAT, True, asked_for(stream, "none"), meter.fingerprint)
    seen = [known.feed(event) for event in stream.events(last=True, each=True)]
    assert [bool(part) for part in seen] == [True, True, True, True, False, True]


def test_a_stream_that_breaks_after_its_choice_ended_shows_that_it_ended() -> None:
    stream = Stream()
    events = stream.events(last=True, each=True)
    error = b'data: {"error":{"message":"no"}}\n\n'
    meter = Meter(CHAT, True, asked_for(stream, "none"))
    seen, usage = metered(meter, [*events[:-2], error, DONE])
    plain = Stream(fingerprint=None).events(last=False, each=False)
    assert seen == b"".join([*plain[:-1], error, DONE])
    assert not usage.complete
    assert usage.output_tokens == 6


def test_an_error_in_a_stream_passes_unchanged() -> None:
    error = b'data: {"error":{"message":"no","code":500}}\n\ndata: [DONE]\n\n'
    seen, usage = metered(Meter(CHAT, True, asked_for(Stream(), "none")), [error])
    assert seen == error
    assert usage == Usage()


def test_prompts_with_several_choices_each_are_charged_once() -> None:
    def event(index: int, prompt: int, output: int) -> bytes:
        usage = {"prompt_tokens": prompt, "total_tokens": 0, "completion_tokens": output}
        value = {"choices": [{"index": index, "text": "x", "finish_reason": None}], "usage": usage}
        return b"data: " + dumps({"id": "x", **value}) + b"\n\n"

    _, asked = asked_by(COMPLETIONS, stream=True, n=2, prompt=["a", "b"])
    came = [event(0, 3, 2), event(2, 5, 1), event(1, 3, 4), event(0, 3, 3), event(3, 5, 1)]
    _, usage = metered(Meter(COMPLETIONS, True, asked), came)
    assert (usage.prompt_tokens, usage.output_tokens) == (8, 9)


WHOLE_USAGE: dict[str, Any] = {"prompt_tokens": 9, "total_tokens": 12, "completion_tokens": 3}
WHOLE_USAGE |= {"prompt_tokens_details": {"cached_tokens": 8, "multimodal_tokens": None}}


@unhurried
@given(cuts=CUTS, before=st.integers(0, 5 * KEPT_BYTES), after=st.integers(0, 5 * KEPT_BYTES))
def test_a_whole_reply_tells_however_long_it_is(cuts: list[int], before: int, after: int) -> None:
    body = dumps(
        {
            "choices": [{"message": {"content": "x" * before + FAKE}}],
            "usage": WHOLE_USAGE,
            "prompt_text": FAKE + "x" * after,
            "metrics": {"speculative_decoding": DRAFTED},
        }
    )
    seen, usage = metered(Meter(CHAT, False, NOTHING), parts(body, cuts))
    assert seen == body
    assert usage == Usage(9, 8, 3, 8, 5, complete=True)


def test_of_a_long_reply_only_the_end_is_kept() -> None:
    meter = Meter("/v1/embeddings", False, NOTHING)
    for _ in range(100):
        meter.feed(b"x" * KEPT_BYTES)
    kept = meter._reader._kept  # type: ignore[attr-defined]
    assert len(kept) <= 2 * KEPT_BYTES


@pytest.mark.parametrize(
    ("path", "body", "counts"),
    [
        ("/v1/embeddings", {"data": [], "usage": {"prompt_tokens": 4, "total_tokens": 4}}, (4, 0)),
        ("/rerank", {"id": "", "usage": {"prompt_tokens": 4, "total_tokens": 4}, "x": 1}, (4, 0)),
        ("/v1/messages", {"id": 1, "usage": {"input_tokens": 4, "output_tokens": 2}}, (4, 0)),
        (
            "/v1/messages",
            {"id": 1, "usage": {"input_tokens": 4, "cache_read_input_tokens": 3}},
            (7, 3),
        ),
        (
            "/v1/responses",
            {"id": 1, "usage": {"input_tokens": 4, "input_tokens_details": {"cached_tokens": 3}}},
            (4, 3),
        ),
    ],
)
def test_each_api_has_its_own_names(
    path: str, body: dict[str, Any], counts: tuple[int, int]
) -> None:
    usage = metered(Meter(path, False, NOTHING), [dumps(body)])[1]
    assert (usage.prompt_tokens, usage.cached_tokens) == counts
    assert usage.complete


def test_an_error_has_no_tokens() -> None:
    usage = metered(Meter(CHAT, False, NOTHING), [b'{"error":{"message":"no"}}'])[1]
    assert usage == Usage()


def named(event: str, **fields: Any) -> bytes:
    return f"event: {event}\ndata: ".encode() + dumps({"type": event, **fields}) + b"\n\n"


def message(texts: list[str]) -> list[bytes]:
    usage = {"output_tokens": 0, "input_tokens": 9}
    start = named("message_start", message={"id": "x", "usage": usage})
    deltas = [named("content_block_delta", delta={"text": text}) for text in texts]
    ended = {"output_tokens": 40, "input_tokens": 2, "cache_read_input_tokens": 7}
    return [start, *deltas, named("message_delta", usage=ended), named("message_stop")]


def response(texts: list[str]) -> list[bytes]:
    # What the client chose is no usage, though it may look like it.
    tools = [{"parameters": {"a": 1, "usage": {"input_tokens": 1, "output_tokens": 1}}}]
    start = named("response.created", response={"tools": tools, "usage": None})
    deltas = [named("response.output_text.delta", delta=text) for text in texts]
    told = {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 7}, "output_tokens": 40}
    ended = {"output": "x" * 3 * KEPT_BYTES, "tools": tools, "usage": told, "user": None}
    return [start, *deltas, named("response.completed", response=ended)]


TEXTS = st.lists(st.sampled_from(["x", "event: content_block_delta\n", "y" * 9_000]), max_size=9)


@unhurried
@given(texts=TEXTS, cuts=CUTS, path=st.sampled_from([MESSAGES, RESPONSES]))
def test_streams_of_the_other_apis_tell_at_their_end(
    texts: list[str], cuts: list[int], path: str
) -> None:
    body = b"".join(message(texts) if path == MESSAGES else response(texts))
    seen, usage = metered(Meter(path, True, NOTHING), parts(body, cuts))
    assert seen == body
    assert usage == Usage(9, 7, 40, complete=True)


@unhurried
@given(texts=TEXTS, cuts=CUTS, path=st.sampled_from([MESSAGES, RESPONSES]))
def test_before_their_end_their_events_are_counted(
    texts: list[str], cuts: list[int], path: str
) -> None:
    events = message(texts)[:-2] if path == MESSAGES else response(texts)[:-1]
    _, usage = metered(Meter(path, True, NOTHING), parts(b"".join(events), cuts))
    prompt = 9 if path == MESSAGES else None
    assert usage == Usage(prompt, output_tokens=len(texts), exact=False)
