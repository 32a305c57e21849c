"""The gateway's ASGI app: reads what routing needs, leases an engine, relays bytes.

Owns the routes, CORS and the reply's headers, but for x-request-id, which Serve
adds to every reply. Leaves bodies to `request`, names to `router.table`, slots to
`leases` and the copying to `relay`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
from starlette.middleware.cors import CORSMiddleware

from serving.engines.keys import ENGINE_KEY_HEADER, AsgiApp, EngineKeys, Receive, Scope, Send
from serving.engines.lease import LEASE_HEADER, Endpoint
from serving.gateway import errors
from serving.gateway.leases import EnginePool
from serving.gateway.relay import Reply, relay
from serving.gateway.request import (
    Disconnected,
    Headers,
    disconnect,
    forwarded,
    parse,
    read_body,
    request_id,
)
from serving.gateway.settings import GatewaySettings
from serving.router.table import ModelRoute, UnknownModelError, VariantRoute
from serving.telemetry.metrics import GatewayMetrics

logger = logging.getLogger("ray.serve")

VARIANT_HEADER = "x-moe-serving-variant"
REPLICA_HEADER = "x-moe-serving-replica"
OVERHEAD_HEADER = "x-moe-serving-overhead-ms"
# What a script in a browser may read of a reply.
EXPOSED_HEADERS = (VARIANT_HEADER, REPLICA_HEADER, OVERHEAD_HEADER, "x-request-id", "retry-after")
# vLLM's inference endpoints. Its control endpoints (sleep, cache resets, profiling,
# /invocations) stay behind the engine port's key.
RELAYED = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/score",
        "/v1/rerank",
        "/tokenize",
        "/detokenize",
        "/score",
        "/rerank",
        "/pooling",
        "/classify",
    }
)
INFORMING = frozenset({"/healthz", "/readyz", "/metrics", "/v1/models"})


@dataclass(frozen=True, slots=True)
class _Call:
    """One request on its way to one variant; `body` names the model by its id."""

    path: str
    headers: Headers
    body: bytes
    request_id: str
    model: ModelRoute
    variant: VariantRoute
    started: float

    @property
    def labels(self) -> tuple[str, str]:
        return self.model.id, self.variant.variant


class GatewayApp:
    """One gateway replica's app; `use` replaces its settings as a whole."""

    def __init__(self, pool: EnginePool, keys: EngineKeys, metrics: GatewayMetrics) -> None:
        self._pool = pool
        self._keys = keys
        self._metrics = metrics
        self._session: aiohttp.ClientSession | None = None
        self.use(GatewaySettings())

    def use(self, settings: GatewaySettings) -> None:
        """Take these settings; requests under way keep theirs."""
        self._settings = settings
        self._app: AsgiApp = self._answer
        if settings.cors_origins:
            self._app = CORSMiddleware(
                self._answer,
                allow_origins=settings.cors_origins,
                allow_methods=("GET", "HEAD", "POST"),
                allow_headers=("*",),
                expose_headers=EXPOSED_HEADERS,
            )

    async def close(self) -> None:
        """Close the connections to engines."""
        if self._session is not None:
            await self._session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        if scope["type"] == "http":
            await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        method, path = scope["method"], scope["path"]
        reply = Reply(send)
        try:
            allowed = _methods(path)
            if not allowed:
                raise errors.unknown_path(method, path)
            if method not in allowed:
                raise errors.method_not_allowed(method, path, ", ".join(allowed))
            if method == "POST":
                await self._infer(await self._read(scope, receive, started), receive, reply)
            else:
                await self._inform(path, reply)
        except errors.ApiError as error:
            await reply.fail(error, path)
        except Disconnected:
            pass
        except Exception:
            logger.exception("request %s failed", request_id(scope))
            await reply.fail(errors.internal_error(), path)

    async def _inform(self, path: str, reply: Reply) -> None:
        if path == "/healthz":
            await reply.json(200, {"status": "alive"})
        elif path == "/readyz":
            await self._pool.look()
            await self._readiness(reply)
        elif path == "/metrics":
            await reply.body(200, b"text/plain; version=0.0.4", self._metrics.exposition())
        elif path == "/v1/models":
            cards = [self._card(*listed) for listed in self._settings.table.names()]
            await reply.json(200, {"object": "list", "data": cards})
        else:
            name = path.removeprefix("/v1/models/")
            await reply.json(200, self._card(name, *self._resolve(name, None)))

    async def _readiness(self, reply: Reply) -> None:
        states = {
            f"{model.id}@{variant.variant}": self._pool.state(variant.app_name)
            for model in self._settings.table.models
            for variant in model.variants
        }
        ready = bool(states) and all(state.ready for state in states.values())
        variants = {name: state.status.lower() for name, state in states.items()}
        await reply.json(200 if ready else 503, {"ready": ready, "variants": variants})

    def _card(self, name: str, model: ModelRoute, variant: VariantRoute) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "moe-serving",
            "root": model.id,
            "max_model_len": variant.max_model_len,
            "variant": variant.variant,
            "speculative": variant.speculative,
            "ready": self._pool.state(variant.app_name).ready,
        }

    def _resolve(self, name: str, variant: str | None) -> tuple[ModelRoute, VariantRoute]:
        try:
            return self._settings.table.resolve(name, variant)
        except UnknownModelError as error:
            raise errors.unknown_model(str(error)) from None

    async def _read(self, scope: Scope, receive: Receive, started: float) -> _Call:
        headers: Headers = dict(scope["headers"])
        body = await read_body(receive, headers, self._settings.max_body_bytes)
        request = parse(body)
        name = request.get("model")
        if not isinstance(name, str):
            known = ", ".join(model.id for model in self._settings.table.models)
            raise errors.model_missing(known or "none")
        asked_variant = headers.get(VARIANT_HEADER.encode(), b"").decode("latin-1") or None
        model, variant = self._resolve(name, asked_variant)
        if name != model.id:
            body = json.dumps({**request, "model": model.id}).encode()
        return _Call(scope["path"], headers, body, request_id(scope), model, variant, started)

    async def _infer(self, call: _Call, receive: Receive, reply: Reply) -> None:
        """Answer `call`, unless the client goes away first; count the outcome."""
        outcome = "disconnect"
        work = asyncio.ensure_future(self._lease_and_relay(call, reply))
        gone = asyncio.ensure_future(disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
                raise Disconnected
            outcome = "500"
            outcome = work.result()
        except errors.ApiError as error:
            outcome = str(error.status)
            raise
        finally:
            # Serve cancels this call, too, when the client goes away.
            gone.cancel()
            work.cancel()
            self._metrics.requests.labels(*call.labels, outcome).inc()

    async def _lease_and_relay(self, call: _Call, reply: Reply) -> str:
        settings = self._settings
        try:
            async with (
                asyncio.timeout(settings.request_timeout_s),
                self._pool.lease(
                    call.variant.app_name, call.model.id, settings.queue_timeout_s
                ) as endpoint,
            ):
                with self._metrics.leases.labels(*call.labels).track_inprogress():
                    return await self._relay(call, reply, endpoint)
        except aiohttp.ClientError:
            raise errors.engine_died(call.model.id) from None
        except TimeoutError:
            raise errors.timed_out(settings.request_timeout_s) from None

    async def _relay(self, call: _Call, reply: Reply, endpoint: Endpoint) -> str:
        headers = forwarded(call.headers) | {
            "content-type": "application/json",
            "x-request-id": call.request_id,
            LEASE_HEADER: endpoint.lease_id,
            ENGINE_KEY_HEADER: self._keys.current(),
        }
        overhead_s = time.perf_counter() - call.started
        self._metrics.overhead.labels(*call.labels).observe(overhead_s)
        reply.headers += [
            (VARIANT_HEADER.encode(), call.variant.variant.encode()),
            (REPLICA_HEADER.encode(), endpoint.replica.encode()),
            (OVERHEAD_HEADER.encode(), f"{overhead_s * 1000:.1f}".encode()),
        ]
        async with self._client().post(
            endpoint.url + call.path, data=call.body, headers=headers
        ) as response:
            return await relay(
                response, reply, call.path, call.model.id, self._settings.keep_alive_s
            )

    def _client(self) -> aiohttp.ClientSession:
        # Made on first use, since a session belongs to the loop that runs it.
        if self._session is None:
            self._session = aiohttp.ClientSession(
                auto_decompress=False,
                connector=aiohttp.TCPConnector(limit=4096),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=self._settings.connect_timeout_s
                ),
            )
        return self._session


def _methods(path: str) -> tuple[str, ...]:
    """The methods `path` takes; none where there is no such path."""
    if path in RELAYED:
        return ("POST",)
    if path in INFORMING or path.startswith("/v1/models/"):
        return ("GET", "HEAD")
    return ()
