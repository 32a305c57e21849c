"""What the rules look at in a request, read once from its body and headers.

Owns which field of which API says what (OpenAI's, Anthropic's, vLLM's own) and the
estimate of the prompt's size. Leaves judging the request to the engine: what is of an
odd type counts as not given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any, Literal

VARIANT_HEADER = "x-moe-serving-variant"
CATEGORY_HEADER = "x-moe-serving-category"
SESSION_HEADER = "x-session-id"
PRIORITY_HEADER = "x-moe-serving-priority"

Priority = Literal["interactive", "batch"]

CHARACTERS_PER_TOKEN = 4
# Values of a prompt that are looked at; to parse so many took longer than to add them up.
MAX_VALUES = 10_000
# vLLM 0.32's own default for /v1/completions, the one path whose body has a `prompt`.
COMPLETION_MAX_TOKENS = 16

# Not a temperature beyond it, but a number too large for any record.
MAX_TEMPERATURE = 1e6

_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_READ_FIRST = ("system", "instructions", "messages", "prompt", "input")
_PROMPTS = ("messages", "prompt", "input", "system", "instructions", "tools")
# Images, sound and files: their base64 is no measure of their tokens.
_MEDIA = frozenset(
    {"image_url", "source", "input_audio", "audio_url", "video_url", "file", "file_data", "data"}
)
_FORCED = frozenset({"function", "custom", "any", "tool"})


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """One request as the rules see it."""

    model: str
    """As asked for: an id, an alias, or either with `@variant`."""
    variant: str | None = None
    """Variant named after `@`."""
    header_variant: str | None = None
    """Variant named by the header."""
    max_tokens: int | None = None
    """Longest answer, in tokens; None where the request sets no limit."""
    prompt_tokens: int = 0
    """Estimate: characters / 4, media left out."""
    structured: bool = False
    """Whether the answer is held to a grammar: a JSON schema, JSON, a regex, a choice."""
    forced_tool: bool = False
    """Whether the answer has to be a call of a tool."""
    category: str | None = None
    session: str | None = None
    """What keeps its choices: the session's id, else a hash of the API key."""
    tenant: str = ""
    """Whose fair share it takes: a hash of the API key, else the session; no rule looks at it."""
    priority: Priority = "interactive"
    """No rule looks at it; the gateway's queue does."""
    previous_response: str | None = None
    """Id of the response that this request continues."""
    held_by: str | None = None
    """Variant that holds that response, where the gateway knows it."""
    temperature: float | None = None
    """No rule looks at it; a study's records have it."""


def read_request(body: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> RouteRequest:
    """The request of a parsed body and its headers (names in lower case, as ASGI has them).

    Never raises.
    """
    name = body.get("model")
    model = name if isinstance(name, str) else ""
    _, separator, variant = model.partition("@")
    key, session = _hash_of_key(headers), _header(headers, SESSION_HEADER)
    return RouteRequest(
        model=model,
        variant=variant if separator else None,
        header_variant=_header(headers, VARIANT_HEADER),
        max_tokens=_max_tokens(body),
        prompt_tokens=_prompt_tokens(body),
        structured=_structured(body),
        forced_tool=_forced_tool(body.get("tool_choice")),
        category=_header(headers, CATEGORY_HEADER),
        session=session or key,
        tenant=key or session or "",
        priority=_priority(body, headers),
        previous_response=_text(body.get("previous_response_id")),
        temperature=_temperature(body.get("temperature")),
    )


def prompt_beginning(body: Mapping[str, Any], limit: int) -> str:
    """The first `limit` characters of the prompt's texts, in the order a model reads them.

    Media, tools and token ids are left out. Never raises.
    """
    parts: list[str] = []
    left = limit
    pending = [body[name] for name in reversed(_READ_FIRST) if name in body]
    for _ in range(MAX_VALUES):
        if not pending or left <= 0:
            break
        value = pending.pop()
        if isinstance(value, str):
            parts.append(value[:left])
            left -= len(parts[-1])
        elif isinstance(value, list):
            pending += reversed(value[:MAX_VALUES])
        elif isinstance(value, Mapping):
            pending += [value[name] for name in ("text", "content") if name in value]
    return "".join(parts)


def _header(headers: Mapping[bytes, bytes], name: str) -> str | None:
    return headers.get(name.encode(), b"").decode("latin-1").strip() or None


def _hash_of_key(headers: Mapping[bytes, bytes]) -> str | None:
    key = headers.get(b"authorization") or headers.get(b"x-api-key")
    return blake2b(key, digest_size=16).hexdigest() if key else None


def _priority(body: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> Priority:
    """The header's; without one, OpenAI's cheaper and slower tier is batch."""
    named = _header(headers, PRIORITY_HEADER)
    flex = body.get("service_tier") == "flex"
    return "batch" if named == "batch" or (named is None and flex) else "interactive"


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    for name in _LIMITS:
        limit = _whole(body.get(name))
        if limit is not None and limit > 0:
            return limit
    return COMPLETION_MAX_TOKENS if "prompt" in body and "max_tokens" not in body else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _temperature(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < MAX_TEMPERATURE else None


def _structured(body: Mapping[str, Any]) -> bool:
    """Whether vLLM will sample by a grammar; it ignores the `guided_*` fields of old."""
    if body.get("structured_outputs"):
        return True
    formats = (
        body.get("response_format"),
        _inside(body.get("text"), "format"),
        _inside(body.get("output_config"), "format"),
    )
    return any(_inside(each, "type") not in (None, "text") for each in formats)


def _inside(block: object, key: str) -> object:
    return block.get(key) if isinstance(block, Mapping) else None


def _forced_tool(choice: object) -> bool:
    kind = _inside(choice, "type")
    return choice == "required" or (isinstance(kind, str) and kind in _FORCED)


def _prompt_tokens(body: Mapping[str, Any]) -> int:
    """Token ids by their number, texts by their characters; at most `MAX_VALUES` values."""
    pending: list[Any] = [body[name] for name in _PROMPTS if name in body]
    characters = ids = seen = 0
    while pending and seen < MAX_VALUES:
        seen += 1
        value = pending.pop()
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, list):
            if value and isinstance(value[0], int):
                ids += len(value)
            else:
                pending += value[:MAX_VALUES]
        elif isinstance(value, Mapping):
            given = islice(value.items(), MAX_VALUES)
            pending += [each for key, each in given if key not in _MEDIA]
    return ids + characters // CHARACTERS_PER_TOKEN
