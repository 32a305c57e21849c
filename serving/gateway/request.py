"""One inference request as it came in: its body, its names, what of it an engine gets.

Owns reading within limits and what is forwarded. Leaves the choice of a model to
`router.table` and every reply to `relay`.
"""

from __future__ import annotations

import json
import re
import uuid
from typing import Any, get_args

from serving.engines.keys import Receive, Scope
from serving.gateway import errors
from serving.router.request import PRIORITY_HEADER, Priority

Headers = dict[bytes, bytes]
# Everything else a client sends, credentials included, stays here.
FORWARDED_HEADERS = frozenset(
    {b"accept", b"traceparent", b"tracestate", b"anthropic-version", b"anthropic-beta"}
)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Disconnected(Exception):
    """The client went away before its reply was complete."""


def request_id(scope: Scope) -> str:
    """The client's own x-request-id where it is short and plain, else a new one."""
    sent = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex


def forwarded(headers: Headers) -> dict[str, str]:
    """The client's headers that an engine gets."""
    return {
        key.decode("latin-1"): value.decode("latin-1")
        for key, value in headers.items()
        if key in FORWARDED_HEADERS
    }


async def read_body(receive: Receive, headers: Headers, limit: int) -> bytes:
    """The whole body, of `limit` bytes at most.

    Raises ApiError 413 as soon as it is known to be longer, Disconnected.
    """
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > limit:
        raise errors.body_too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise errors.body_too_large(limit)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


def parse(body: bytes) -> dict[str, Any]:
    """The body as a JSON object; raises ApiError 400."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise errors.bad_json(f"not JSON ({error})") from None
    if not isinstance(request, dict):
        raise errors.bad_json("a JSON object is needed")
    return request


def check_headers(headers: Headers) -> None:
    """Raises ApiError 400 for a priority that there is not."""
    value = headers.get(PRIORITY_HEADER.encode(), b"").decode("latin-1").strip()
    if value and value not in get_args(Priority):
        known = " or ".join(get_args(Priority))
        raise errors.header_not_usable(PRIORITY_HEADER, value, known)


async def disconnect(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
