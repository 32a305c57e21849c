"""API errors: one type, rendered in OpenAI's shape or, on `/v1/messages`, in Anthropic's.

Owns the mapping from what went wrong to status, body and headers. Errors that
vLLM itself answers with a 4xx are not ours and pass through unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import ceil
from typing import Any

ANTHROPIC_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"

DIED = "engine_died"
SILENT = "engine_silent"
# With these another replica or variant may answer what this one could not.
_ELSEWHERE = frozenset({DIED, "engine_unavailable", "engine_unfit"})

_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A failure a client is told about.

    `retry_after_s` becomes a Retry-After header, rounded up to whole seconds;
    `allow`, the methods a path takes, an Allow header.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers: list[tuple[bytes, bytes]] = []
        if retry_after_s is not None:
            self.headers.append((b"retry-after", str(ceil(retry_after_s)).encode()))
        if allow is not None:
            self.headers.append((b"allow", allow.encode()))

    @property
    def elsewhere(self) -> bool:
        """Whether the fault lies with the engine, so that another one may answer."""
        return self.code in _ELSEWHERE

    def body(self, path: str) -> dict[str, Any]:
        """The error object for a client of `path`."""
        if path.startswith(ANTHROPIC_PATH):
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = _OPENAI_TYPES.get(self.status, "server_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def sse_event(self, path: str, sequence_number: int = 0) -> bytes:
        """The last event of a stream that could not be finished, as clients of `path` read it.

        `sequence_number` is the event's own, counted as `/v1/responses` counts.
        """
        body = self.body(path)
        if path == RESPONSES_PATH:
            details = {"code": self.code, "message": self.message, "param": self.param}
            body = {"type": "error", **details, "sequence_number": sequence_number}
        data = b"data: " + json.dumps(body).encode() + b"\n\n"
        named = path == RESPONSES_PATH or path.startswith(ANTHROPIC_PATH)
        return b"event: error\n" + data if named else data


def unauthorized(message: str) -> ApiError:
    """No valid key came with the request; the code is OpenAI's."""
    error = ApiError(401, "invalid_api_key", message)
    error.headers.append((b"www-authenticate", b"Bearer"))
    return error


def forbidden(message: str) -> ApiError:
    """The key is valid, but not for this."""
    return ApiError(403, "permission_denied", message)


def limited(message: str, retry_after_s: float | None, headers: Mapping[str, str]) -> ApiError:
    """A limit of the team or the key is reached; the code is OpenAI's."""
    error = ApiError(429, "rate_limit_exceeded", message, retry_after_s=retry_after_s)
    error.headers += [(name.encode(), value.encode()) for name, value in headers.items()]
    return error


def keys_unavailable(message: str) -> ApiError:
    """Keys or limits cannot be checked now; nobody is let in unchecked."""
    return ApiError(503, "keys_unavailable", message, retry_after_s=2)


def bad_json(problem: str) -> ApiError:
    """The request's body is not a JSON object."""
    return ApiError(400, "invalid_json", f"the request body is not usable: {problem}")


def model_missing(known: str) -> ApiError:
    """The body has no `model`, or one that is no string."""
    return ApiError(
        400,
        "model_missing",
        f'"model" is missing or not a string; served: {known}',
        param="model",
    )


def header_not_usable(name: str, value: str, known: str) -> ApiError:
    """A header of ours with a value that it does not take."""
    return ApiError(
        400, "header_not_usable", f"the header {name} is {value[:60]!r}; write {known}", param=name
    )


def body_too_large(limit_bytes: int) -> ApiError:
    """The body is over the stack's `gateway.max_body_mib`."""
    return ApiError(
        413,
        "request_too_large",
        f"the request body is over this gateway's limit of {limit_bytes} bytes "
        "(gateway.max_body_mib in the stack file)",
    )


def unknown_model(message: str) -> ApiError:
    """The stack does not serve what `model` names."""
    return ApiError(404, "model_not_found", message, param="model")


def unknown_path(method: str, path: str) -> ApiError:
    """No route of the gateway or of the engines."""
    return ApiError(404, "unknown_path", f"{method} {path} is not served here")


def method_not_allowed(method: str, path: str, allowed: str) -> ApiError:
    """The path exists, for other methods."""
    return ApiError(
        405, "method_not_allowed", f"{path} takes {allowed}, not {method}", allow=allowed
    )


def not_offered(model: str, path: str) -> ApiError:
    """The engine has no such endpoint, for instance embeddings on a chat model."""
    return ApiError(404, "not_offered", f"the model {model!r} does not offer {path}", param="model")


def no_capacity(model: str, retry_after_s: float) -> ApiError:
    """Every slot is taken and the queue is full or the wait was too long."""
    return ApiError(
        429,
        "no_capacity",
        f"{model} has no free slot now; retry after the time in Retry-After",
        retry_after_s=retry_after_s,
    )


def gateway_full(retry_after_s: float) -> ApiError:
    """This gateway process holds as many requests as it may."""
    return ApiError(
        429,
        "no_capacity",
        "the gateway holds as many requests as it may; retry after the time in Retry-After",
        retry_after_s=retry_after_s,
    )


def response_out_of_reach(model: str) -> ApiError:
    """The replica that holds the response is gone, or others were chosen again and again.

    404 and the parameter, as vLLM answers where it does not have a response; the code is
    OpenAI's for it.
    """
    return ApiError(
        404,
        "previous_response_not_found",
        f"the replica of {model} that holds this response was not reached; it is gone or very "
        "busy. Send the conversation in input, without previous_response_id",
        param="previous_response_id",
    )


def engine_unavailable(model: str, state: str, retry_after_s: float) -> ApiError:
    """No replica can answer: it is loading, or it died and is being replaced."""
    return ApiError(
        503,
        "engine_unavailable",
        f"{model} is not ready: {state}",
        retry_after_s=retry_after_s,
    )


def engine_waking(model: str, waited_s: float, retry_after_s: float) -> ApiError:
    """The engine was scaled to zero, and the request has waited for it as long as it may."""
    return ApiError(
        503,
        "engine_waking",
        f"{model} had no replica and none was ready within {waited_s:g} s "
        "(gateway.wake_timeout_s in the stack file); retry after the time in Retry-After",
        retry_after_s=retry_after_s,
    )


def engine_unfit(model: str, reason: str, retry_after_s: float) -> ApiError:
    """Replicas run, but failed a probe or have collapsed since."""
    return ApiError(
        503,
        "engine_unfit",
        f"{model} is not fit to serve: {reason}",
        retry_after_s=retry_after_s,
    )


def engine_died(model: str) -> ApiError:
    """The engine went away before the reply began or in the middle of it."""
    return ApiError(
        503,
        DIED,
        f"the engine of {model} stopped before the reply was complete",
        retry_after_s=5,
    )


def engine_silent(model: str, limit_s: float) -> ApiError:
    """A stream's engine sent nothing for longer than it may."""
    return ApiError(
        504,
        SILENT,
        f"the engine of {model} sent nothing for {limit_s:g} s (gateway.first_byte_timeout_s and "
        "gateway.between_bytes_timeout_s in the stack file)",
    )


def engine_failed(model: str) -> ApiError:
    """The engine answered 500 without saying why."""
    return ApiError(
        500, "engine_error", f"the engine of {model} failed on this request; its log says why"
    )


def timed_out(limit_s: float) -> ApiError:
    """The reply was not complete within `gateway.request_timeout_s`."""
    return ApiError(
        504,
        "timeout",
        f"no complete reply within {limit_s:g} s (gateway.request_timeout_s in the stack file)",
    )


def internal_error() -> ApiError:
    """A fault of the gateway's own; the log has the trace, the client does not."""
    return ApiError(500, "internal_error", "the gateway failed; its log has the details")
