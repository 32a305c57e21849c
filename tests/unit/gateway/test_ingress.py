"""Which requests the gateway's app gets before Serve does, and which Serve keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ray.serve._private.http_util import (
    call_function_from_import_path,
    validate_http_proxy_callback_return,
)

from serving.engines.keys import AsgiApp, Receive, Scope, Send
from serving.gateway.ingress import Ingress
from serving.stack.environment import MIDDLEWARES


class Noted:
    """An ASGI app that notes the paths it was asked for."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])


@pytest.fixture
def serves() -> Iterator[Noted]:
    yield Noted()
    Ingress.app = None


def made(serves: AsgiApp) -> AsgiApp:
    """What stands before `serves`, as Serve puts it there."""
    (middleware,) = validate_http_proxy_callback_return(call_function_from_import_path(MIDDLEWARES))
    app: Any = middleware.cls(serves, *middleware.args, **middleware.kwargs)
    return app


async def ask(app: AsgiApp, path: str, kind: str = "http") -> None:
    async def receive() -> dict[str, Any]:
        raise AssertionError("nobody reads")

    async def send(message: dict[str, Any]) -> None:
        raise AssertionError("nobody writes")

    await app({"type": kind, "path": path}, receive, send)


async def test_requests_go_to_the_gateway_and_serves_own_to_serve(serves: Noted) -> None:
    ingress, gateway = made(serves), Noted()
    Ingress.app = gateway
    for path in ("/v1/models", "/-/healthz", "/", "/-/routes"):
        await ask(ingress, path)
    assert gateway.paths == ["/v1/models", "/"]
    assert serves.paths == ["/-/healthz", "/-/routes"]


async def test_a_process_without_a_gateway_leaves_all_to_serve(serves: Noted) -> None:
    await ask(made(serves), "/v1/models")
    assert serves.paths == ["/v1/models"]


async def test_what_is_no_http_request_is_serves(serves: Noted) -> None:
    Ingress.app = gateway = Noted()
    await ask(made(serves), "/v1/realtime", "websocket")
    assert (gateway.paths, serves.paths) == ([], ["/v1/realtime"])
