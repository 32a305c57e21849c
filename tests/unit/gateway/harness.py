"""A gateway on a loopback port, as Serve runs it, before a fake engine on another.

What stands in for Ray is the pool alone: it yields the fake engine's endpoint.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import uvicorn

from serving.engines.keys import AsgiApp, EngineKeys, Receive, Scope, Send
from serving.engines.lease import Endpoint
from serving.gateway import errors
from serving.gateway.app import GatewayApp
from serving.gateway.breakers import Breakers
from serving.gateway.leases import EnginePool, EngineState
from serving.gateway.settings import GatewaySettings
from serving.router.balancing import Hint
from serving.router.settings import Routing
from serving.router.table import ModelRoute, RoutingTable, VariantRoute
from serving.telemetry.metrics import GatewayMetrics

# On a busy machine everything takes long; nothing here is expected to.
PATIENCE_S = 30
MODEL = "tiny-moe"
COMPLETIONS = "/v1/completions"
TABLE = RoutingTable(
    models=(
        ModelRoute(
            id=MODEL,
            aliases=("chat",),
            default_variant="mtp",
            variants=(
                VariantRoute(
                    variant="mtp",
                    app_name="engine-mtp",
                    max_model_len=4096,
                    slots=64,
                    speculative={"method": "mtp", "num_speculative_tokens": 2},
                ),
                VariantRoute(
                    variant="plain", app_name="engine-plain", max_model_len=4096, slots=64
                ),
            ),
        ),
    )
)

Behaviour = Callable[[Send], Awaitable[None]]


async def start(
    send: Send, content_type: str, status: int = 200, length: int | None = None
) -> None:
    """Begin a reply."""
    headers = [(b"content-type", content_type.encode())]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def write(send: Send, body: bytes, *, more: bool = True) -> None:
    """Send a part of a reply's body."""
    await send({"type": "http.response.body", "body": body, "more_body": more})


def whole(body: bytes, content_type: str = "application/json", status: int = 200) -> Behaviour:
    """An engine that answers with this body at once."""

    async def behave(send: Send) -> None:
        await start(send, content_type, status, len(body))
        await write(send, body, more=False)

    return behave


def events(*parts: bytes, status: int = 200, then: Exception | None = None) -> Behaviour:
    """An engine that streams these parts, and then breaks the connection where told to."""

    async def behave(send: Send) -> None:
        await start(send, "text/event-stream; charset=utf-8", status)
        for part in parts:
            await write(send, part)
        if then is not None:
            raise then
        await write(send, b"", more=False)

    return behave


async def until(reached: Callable[[], bool]) -> None:
    """Return when it is so."""
    async with asyncio.timeout(PATIENCE_S):
        while not reached():
            await asyncio.sleep(0.01)


@dataclass
class FakeEngine:
    """Notes what reaches it and answers as `behave` says; `gone` is set when it is left."""

    behave: Behaviour = field(default_factory=lambda: whole(b'{"id": "reply"}'))
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    busy: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.paths.append(scope["path"])
        headers = scope["headers"]
        self.headers.append({key.decode(): value.decode("latin-1") for key, value in headers})
        self.bodies.append(body)
        self.busy.set()
        watch = asyncio.create_task(self._watch(receive))
        try:
            await self.behave(send)
        finally:
            watch.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.set()

    @property
    def request(self) -> dict[str, Any]:
        """The last request's body."""
        body: dict[str, Any] = json.loads(self.bodies[-1])
        return body


@dataclass
class FakePool:
    """Leases on the fake engine; `held` counts those that are out."""

    url: str
    states: Mapping[str, EngineState] = field(
        default_factory=lambda: dict.fromkeys(
            ("engine-mtp", "engine-plain"), EngineState(1, "RUNNING")
        )
    )
    elsewhere: dict[str, str] = field(default_factory=dict)
    """Applications that are served at another URL."""
    replicas: list[str] = field(default_factory=list)
    """URLs of the next leases' replicas, `replica-1` and so on; then the usual one again."""
    failure: Exception | None = None
    failing: set[str] = field(default_factory=set)
    """Applications of which no replica runs."""
    free: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    leased: list[str] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)
    held: int = 0
    on_look: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.free.set()

    def state(self, app_name: str) -> EngineState:
        return self.states.get(app_name, EngineState(0, "NOT_STARTED"))

    async def look(self) -> None:
        """The states are always fresh."""

    @asynccontextmanager
    async def lease(
        self,
        app_name: str,
        model: str,
        queue_timeout_s: float,
        hint: Hint,
        wake_timeout_s: float = 0.0,
    ) -> AsyncIterator[Endpoint]:
        self.leased.append(app_name)
        self.hints.append(hint)
        self.held += 1
        self.asked.set()
        try:
            await self.free.wait()
            if self.failure is not None:
                raise self.failure
            if app_name in self.failing:
                raise errors.engine_unavailable(model, "its engine is deploying", 10)
            url = self.elsewhere.get(app_name, self.url)
            if self.replicas:
                url = self.replicas.pop(0)
            yield Endpoint(url=url, replica=f"replica-{len(self.leased)}", lease_id="lease-1")
        finally:
            self.held -= 1
            self.released.set()


@asynccontextmanager
async def served(app: AsgiApp) -> AsyncIterator[str]:
    """Serve `app` on a free loopback port; yields its URL and cuts every connection at the end."""
    config = uvicorn.Config(
        cast(Any, app), host="127.0.0.1", port=0, lifespan="off", log_level="critical"
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.servers[0].close()
        for connection in list(server.server_state.connections):
            cast(Any, connection).transport.abort()
        for task in server.server_state.tasks:
            task.cancel()
        await asyncio.gather(*server.server_state.tasks, return_exceptions=True)


@dataclass
class Stack:
    """The gateway under test and what stands around it."""

    engine: FakeEngine
    pool: FakePool
    app: GatewayApp
    client: httpx.AsyncClient

    def use(self, **settings: Any) -> None:
        """Give the gateway these settings, with the usual table."""
        self.app.use(GatewaySettings(table=TABLE, **settings))

    def route(self, routing: Routing, *more: ModelRoute, **settings: Any) -> None:
        """Give the gateway the usual table with this `routing` block, and more models."""
        model = TABLE.models[0].model_copy(update={"routing": routing})
        self.app.use(GatewaySettings(table=RoutingTable(models=(model, *more)), **settings))

    async def ask(self, path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
        """POST a request for the model."""
        return await self.client.post(path, json={"model": MODEL, "prompt": "a", **fields})

    async def metrics(self) -> str:
        """The gateway's own metrics."""
        return (await self.client.get("/metrics")).text


@asynccontextmanager
async def running_stack() -> AsyncIterator[Stack]:
    """A gateway before one fake engine, with the client that asks it."""
    engine = FakeEngine()
    async with served(engine) as engine_url:
        pool = FakePool(engine_url)
        keys = EngineKeys(keys=("engine-secret",))
        app = GatewayApp(cast(EnginePool, pool), keys, GatewayMetrics(), Breakers(time.monotonic))
        async with (
            served(app) as url,
            # Loading certificates would take longer than a test.
            httpx.AsyncClient(
                base_url=url, trust_env=False, verify=False, timeout=PATIENCE_S
            ) as client,
        ):
            stack = Stack(engine, pool, app, client)
            stack.use()
            yield stack
        app.close()
