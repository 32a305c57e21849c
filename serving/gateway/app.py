"""The gateway's ASGI app: reads what routing needs, leases an engine, relays bytes.

Owns the routes, the request's `model` and limits, and the reply's headers.
Leaves names to `router.table`, slots to `leases` and the copying to `relay`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from typing import Any

import aiohttp

from serving.engines.keys import ENGINE_KEY_HEADER, EngineKeys, Receive, Scope, Send
from serving.engines.lease import LEASE_HEADER
from serving.gateway import errors
from serving.gateway.leases import EnginePool
from serving.gateway.relay import Reply, relay
from serving.gateway.settings import GatewaySettings
from serving.router.table import ModelRoute, UnknownModelError, VariantRoute
from serving.telemetry.metrics import GatewayMetrics

logger = logging.getLogger("ray.serve")

VARIANT_HEADER = "x-moe-serving-variant"
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
# Everything else a client sends, credentials included, stays here.
FORWARDED_HEADERS = frozenset(
    {b"accept", b"traceparent", b"tracestate", b"anthropic-version", b"anthropic-beta"}
)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Disconnected(Exception):
    """The client went away before its reply was complete."""


class GatewayApp:
    """One gateway replica's app; `settings` is replaced as a whole when the stack changes."""

    def __init__(self, pool: EnginePool, keys: EngineKeys, metrics: GatewayMetrics) -> None:
        self.settings = GatewaySettings()
        self._pool = pool
        self._keys = keys
        self._metrics = metrics
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        if scope["type"] != "http":
            return
        started = time.perf_counter()
        method, path = scope["method"], scope["path"]
        request_id = _request_id(scope)
        reply = Reply(send, request_id)
        try:
            if method == "POST" and path in RELAYED:
                await self._infer(scope, receive, reply, started)
            elif method in ("GET", "HEAD"):
                await self._inform(path, reply)
            else:
                raise errors.unknown_path(method, path)
        except errors.ApiError as error:
            await reply.fail(error, path)
        except Disconnected:
            pass
        except Exception:
            logger.exception("request %s failed", request_id)
            await reply.fail(errors.internal_error(), path)

    async def _inform(self, path: str, reply: Reply) -> None:
        if path == "/healthz":
            await reply.json(200, {"status": "alive"})
        elif path == "/readyz":
            await self._readiness(reply)
        elif path == "/metrics":
            await reply.body(200, b"text/plain; version=0.0.4", self._metrics.exposition())
        elif path == "/v1/models":
            cards = [self._card(*listed) for listed in self.settings.table.names()]
            await reply.json(200, {"object": "list", "data": cards})
        elif path.startswith("/v1/models/"):
            name = path.removeprefix("/v1/models/")
            model, variant = self._resolve(name, None)
            await reply.json(200, self._card(name, model, variant))
        else:
            raise errors.unknown_path("GET", path)

    async def _readiness(self, reply: Reply) -> None:
        states = {
            f"{model.id}@{variant.variant}": self._pool.state(variant.app_name)
            for model in self.settings.table.models
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
            return self.settings.table.resolve(name, variant)
        except UnknownModelError as error:
            raise errors.unknown_model(str(error)) from None

    async def _infer(self, scope: Scope, receive: Receive, reply: Reply, started: float) -> None:
        settings, path = self.settings, scope["path"]
        headers: dict[bytes, bytes] = dict(scope["headers"])
        body = await _read_body(receive, headers, settings.max_body_bytes)
        request = _parse(body)
        name = request.get("model")
        if name is None and len(settings.table.models) == 1:
            name = settings.table.models[0].id
        if not isinstance(name, str):
            raise errors.bad_json('"model" is missing or not a string')
        asked_variant = headers.get(VARIANT_HEADER.encode(), b"").decode("latin-1") or None
        model, variant = self._resolve(name, asked_variant)
        if request.get("model") != model.id:
            body = json.dumps({**request, "model": model.id}).encode()

        work = asyncio.ensure_future(
            self._lease_and_relay(path, headers, body, model, variant, reply, started)
        )
        gone = asyncio.ensure_future(_disconnect(receive))
        labels = (model.id, variant.variant)
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
                self._metrics.requests.labels(*labels, "disconnect").inc()
                raise Disconnected
            self._metrics.requests.labels(*labels, work.result()).inc()
        except errors.ApiError as error:
            self._metrics.requests.labels(*labels, str(error.status)).inc()
            raise
        finally:
            gone.cancel()
            work.cancel()

    async def _lease_and_relay(
        self,
        path: str,
        headers: dict[bytes, bytes],
        body: bytes,
        model: ModelRoute,
        variant: VariantRoute,
        reply: Reply,
        started: float,
    ) -> str:
        settings = self.settings
        labels = (model.id, variant.variant)
        async with (
            asyncio.timeout(settings.request_timeout_s) as limit,
            self._pool.lease(variant.app_name, model.id, settings.queue_timeout_s) as endpoint,
        ):
            reply.headers += [
                (VARIANT_HEADER.encode(), variant.variant.encode()),
                (b"x-moe-serving-replica", endpoint.replica.encode()),
            ]
            forwarded = {
                key.decode("latin-1"): value.decode("latin-1")
                for key, value in headers.items()
                if key in FORWARDED_HEADERS
            }
            forwarded |= {
                "content-type": "application/json",
                "x-request-id": reply.request_id,
                LEASE_HEADER: endpoint.lease_id,
                ENGINE_KEY_HEADER: self._keys.current(),
            }
            with self._metrics.leases.labels(*labels).track_inprogress():
                try:
                    sent = time.perf_counter()
                    async with self._client().post(
                        endpoint.url + path, data=body, headers=forwarded
                    ) as response:
                        overhead_s = sent - started
                        self._metrics.overhead.labels(*labels).observe(overhead_s)
                        milliseconds = f"{overhead_s * 1000:.1f}"
                        reply.headers.append((b"x-moe-serving-overhead-ms", milliseconds.encode()))
                        return await relay(response, reply, path, model.id, settings.keep_alive_s)
                except aiohttp.ClientError:
                    raise errors.engine_died(model.id) from None
                except TimeoutError:
                    if limit.expired():
                        raise
                    raise errors.engine_died(model.id) from None
                except asyncio.CancelledError:
                    if limit.expired():
                        raise errors.timed_out(settings.request_timeout_s) from None
                    raise

    def _client(self) -> aiohttp.ClientSession:
        # Made on first use, since a session belongs to the loop that runs it.
        if self._session is None:
            self._session = aiohttp.ClientSession(
                auto_decompress=False,
                connector=aiohttp.TCPConnector(limit=4096),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=self.settings.connect_timeout_s
                ),
            )
        return self._session


def _request_id(scope: Scope) -> str:
    """The client's own x-request-id where it is short and plain, else a new one."""
    for key, value in scope["headers"]:
        if key == b"x-request-id" and _REQUEST_ID.fullmatch(value.decode("latin-1")):
            return str(value.decode("latin-1"))
    return uuid.uuid4().hex


async def _read_body(receive: Receive, headers: dict[bytes, bytes], limit: int) -> bytes:
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


def _parse(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise errors.bad_json(f"not JSON ({error})") from None
    if not isinstance(request, dict):
        raise errors.bad_json("a JSON object is needed")
    return request


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
