"""Errors of the admin API in OpenAI's shape: what went wrong, where, and the cure.

Owns status codes and texts; nothing of the database's own words reaches a client. What is refused
before a request comes here (no key, a wrong scope, a body too large) is the gateway's to tell.
"""

from __future__ import annotations

import json
import logging
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from serving.teams.errors import ForbiddenError, StoreError, TeamsError, UnknownNameError

logger = logging.getLogger("ray.serve")

OPENAPI_PATH: Final = "/admin/openapi.json"
RETRY_AFTER_S = 5
_SHOWN = 60
_TYPES = {
    400: "invalid_request_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
}
_MEANINGS = {
    400: "A field or the body is not usable; `param` names it",
    401: "No valid key came with the request",
    403: "The key may not be used for this",
    404: "There is nothing of this name",
    409: "What is there already, or its state, does not allow it",
    503: "The database cannot be used now; Retry-After says when to try again",
}
# What a text of the room's errors would have a command line do.
_CURES = {
    (404, "team"): "GET /admin/teams lists them",
    (404, "key"): "GET /admin/keys lists them",
    (409, "team"): "change it with PATCH /admin/teams/{team}",
    (409, "key"): "make a new one with POST /admin/keys",
}


class ErrorDetail(BaseModel):
    """What went wrong."""

    model_config = ConfigDict(extra="forbid")

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """Every error, in the shape that OpenAI's clients read."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorDetail


def told(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """FastAPI's `responses` for an operation that can answer these, and what all can."""
    common = (401, 403, 503)
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody, "description": _MEANINGS[status]}
        for status in sorted({*common, *statuses})
    }
    responses["default"] = {"model": ErrorBody, "description": "Any other error"}
    return responses


class UnknownModelError(TeamsError):
    """No model of this name is served, nor has the team used one."""


def shape_errors(app: FastAPI) -> None:
    """Have `app` answer every error in OpenAI's shape."""
    app.add_exception_handler(RequestValidationError, _not_valid)
    app.add_exception_handler(HTTPException, _not_routed)
    app.add_exception_handler(TeamsError, _refused)
    app.add_exception_handler(Exception, _failed)


async def _not_valid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    kind, place = first["type"], first["loc"]
    if kind == "json_invalid":
        return _answer(400, "invalid_json", _bad_body(f"not JSON ({first['ctx']['error']})"))
    param = ".".join(_shortened(part) for part in place[1:])
    if not param:
        return _answer(400, "invalid_json", _bad_body("a JSON object is needed"))
    if kind == "missing":
        return _answer(400, "missing_value", f"{param}: missing; give it", param)
    found = f"{param}: found {reprlib.repr(first['input'])[:_SHOWN]}"
    if kind == "extra_forbidden":
        text = f"{found}, which is no field here; {OPENAPI_PATH} has those that are"
        return _answer(400, "unknown_value", text, param)
    message = first["msg"]
    return _answer(400, "invalid_value", f"{found}; {message[:1].lower()}{message[1:]}", param)


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, _shortened(request.scope["path"])
    if error.status_code == 404:
        return _answer(404, "unknown_path", f"{method} {path} is not served here")
    if error.status_code == 405:
        allowed = ", ".join(_methods(request))
        text = f"{path} takes {allowed}, not {method}"
        return _answer(405, "method_not_allowed", text, headers={"allow": allowed})
    return _answer(400, "invalid_json", _bad_body("not JSON that can be read"))


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, StoreError):
        logger.error("%s %r: %s", request.method, _shortened(request.scope["path"]), error)
        text = "the database cannot be used now; retry after the time in Retry-After"
        return _answer(503, "store_unavailable", text, headers={"retry-after": str(RETRY_AFTER_S)})
    if isinstance(error, UnknownModelError):
        return _answer(404, "model_not_found", str(error), "model")
    if isinstance(error, ForbiddenError):
        return _answer(403, "permission_denied", str(error), "model")
    status, code = (404, "not_found") if isinstance(error, UnknownNameError) else (409, "conflict")
    # "team: what is wrong; the cure"
    said, _, cure = str(error).partition("; ")
    param = said.partition(":")[0]
    cure = _CURES.get((status, param), cure)
    return _answer(status, code, f"{said}; {cure}", param)


async def _failed(request: Request, error: Exception) -> Response:
    return _answer(500, "internal_error", "the gateway failed; its log has the details")


def _answer(
    status: int,
    code: str,
    message: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    kind = _TYPES.get(status, "server_error")
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    # In ASCII: a client may have sent half a surrogate pair, which UTF-8 cannot hold.
    return Response(json.dumps(body), status, headers, media_type="application/json")


def _bad_body(problem: str) -> str:
    return f"the request body is not usable: {problem}; send it with content-type: application/json"


def _methods(request: Request) -> Sequence[str]:
    """The methods that the path takes; Starlette names those of its first operation only."""
    return sorted(
        method
        for route in request.app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    )


def _shortened(part: object) -> str:
    return str(part)[:_SHOWN]
