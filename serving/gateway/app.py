"""The gateway's ASGI app: reads what routing needs, leases an engine, relays bytes.

Owns the routes, CORS, how many requests are held at once, and counting what became of each.
Leaves bodies to `request`, the choice of a variant to `router`, sending to `dispatch`, repeats to
`shadow` and the records of a study to `splits`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from serving.engines.keys import AsgiApp, EngineKeys, Receive, Scope, Send
from serving.gateway import errors
from serving.gateway.admission import Admission, AdmissionMetrics, limits_of
from serving.gateway.breakers import Breakers
from serving.gateway.call import (
    FALLBACK_HEADER,
    OVERHEAD_HEADER,
    REPLICA_HEADER,
    RETRIES_HEADER,
    ROUTE_HEADER,
    Call,
)
from serving.gateway.dispatch import Dispatch
from serving.gateway.engine_http import EngineClient
from serving.gateway.fair_queue import Limits
from serving.gateway.kept import Kept, KeptResponses
from serving.gateway.leases import RETRY_AFTER_BUSY_S, EnginePool
from serving.gateway.relay import Reply
from serving.gateway.request import (
    Disconnected,
    Headers,
    check_headers,
    disconnect,
    parse,
    read_body,
    request_id,
)
from serving.gateway.settings import GatewaySettings
from serving.gateway.shadow import Shadows
from serving.gateway.splits import SplitRecords
from serving.gateway.teams import Teams
from serving.gateway.timed import MeteredReply, TimedReply
from serving.router.balancing import hint_of
from serving.router.choose import Decision, Router
from serving.router.request import VARIANT_HEADER, RouteRequest, read_request
from serving.router.rules import Load
from serving.router.table import ModelRoute, UnknownModelError, VariantRoute
from serving.teams.authenticate import require_model
from serving.teams.caller import Caller
from serving.teams.errors import ForbiddenError
from serving.teams.metering import NOTHING, ask_for_usage
from serving.telemetry.metrics import GatewayMetrics

logger = logging.getLogger("ray.serve")

# What a script in a browser may read of a reply.
EXPOSED_HEADERS = (
    VARIANT_HEADER,
    ROUTE_HEADER,
    REPLICA_HEADER,
    FALLBACK_HEADER,
    RETRIES_HEADER,
    OVERHEAD_HEADER,
    "x-request-id",
    "retry-after",
    *(
        f"x-ratelimit-{told}-{counted}"
        for counted in ("requests", "tokens")
        for told in ("limit", "remaining", "reset")
    ),
)
# What a variant decides the speed of; only these are repeated and recorded.
GENERATING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
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
# What a load balancer asks, which has no key.
WITHOUT_KEY = frozenset({"/healthz", "/readyz"})
# As web servers log it.
CLIENT_LEFT = 499
ADMIN = "/admin"
OWN_USAGE = "/v1/usage"


class GatewayApp:
    """One gateway replica's app, on the Ray node `node`; `use` replaces its settings as a whole."""

    def __init__(
        self,
        pool: EnginePool,
        keys: EngineKeys,
        metrics: GatewayMetrics,
        breakers: Breakers,
        node: str = "",
    ) -> None:
        self._pool = pool
        self._metrics = metrics
        self._engines = EngineClient(node)
        self._admission = Admission(Limits())
        metrics.registry.register(AdmissionMetrics(self._admission))
        self._dispatch = Dispatch(pool, self._engines, keys, metrics, self._admission, breakers)
        self._shadows = Shadows(pool, self._engines, keys, metrics, self._admission)
        self._splits = SplitRecords(metrics)
        self._kept = KeptResponses()
        self._router = Router(random.random)
        self._held = 0
        self.teams: Teams | None = None
        """Who may ask, where settings say that keys are needed."""
        pool.on_look = self._limit
        self.use(GatewaySettings())

    def use(self, settings: GatewaySettings) -> None:
        """Take these settings; requests under way keep theirs."""
        self._settings = settings
        self._limit()
        self._app: AsgiApp = self._answer
        if settings.cors_origins:
            self._app = CORSMiddleware(
                self._answer,
                allow_origins=settings.cors_origins,
                allow_methods=("GET", "HEAD", "POST"),
                allow_headers=("*",),
                expose_headers=EXPOSED_HEADERS,
            )

    def models(self) -> list[str]:
        """The ids of the models that are served."""
        return [model.id for model in self._settings.table.models]

    def _limit(self) -> None:
        """Have as many requests run and wait as settings and running replicas allow."""
        pool = self._pool
        self._admission.set_limits(
            limits_of(self._settings, lambda route: pool.state(route.app_name).running_replicas)
        )

    def close(self) -> None:
        """End the repeats, write what is to be recorded, close connections that are not used."""
        self._shadows.close()
        self._splits.close()
        self._engines.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        if scope["type"] == "http":
            await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        method, path = scope["method"], scope["path"]
        called = request_id(scope)
        reply = Reply(send, called)
        try:
            caller = self._caller(scope)
            if caller is not None and (path == OWN_USAGE or _is_below(path, ADMIN)):
                await self._administer(caller, scope, receive, reply)
                return
            allowed = _methods(path)
            if not allowed:
                raise errors.unknown_path(method, path)
            if method not in allowed:
                raise errors.method_not_allowed(method, path, ", ".join(allowed))
            if method == "POST":
                with self._holding():
                    call = await self._read(scope, receive, called, started, caller)
                    if caller is not None:
                        began = partial(self._began, call)
                        reply = MeteredReply(send, called, began, call.path, call.usage)
                        await self._charge(caller, call, receive, reply)
                        return
                    if call.path in GENERATING and (
                        call.decision.arm or call.model.keeps_responses
                    ):
                        reply = TimedReply(send, called, partial(self._began, call))
                    await self._infer(call, receive, reply)
            else:
                await self._inform(path, reply, caller)
        except errors.ApiError as error:
            await reply.fail(error, path)
        except Disconnected:
            pass
        except Exception:
            logger.exception("request %s failed", called)
            await reply.fail(errors.internal_error(), path)

    @contextmanager
    def _holding(self) -> Iterator[None]:
        """Count a request while the block runs; raises ApiError where it is one too many."""
        if self._held >= self._settings.max_ongoing_requests:
            raise errors.gateway_full(RETRY_AFTER_BUSY_S)
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    def _caller(self, scope: Scope) -> Caller | None:
        """Who asks; None where nobody needs a key. Raises ApiError 401, 403 or 503."""
        path = scope["path"]
        if not self._settings.keys or path in WITHOUT_KEY:
            return None
        if self.teams is None:
            raise errors.keys_unavailable("keys cannot be checked yet; try again in a moment")
        administers = path == "/metrics" or _is_below(path, ADMIN)
        return self.teams.caller(dict(scope["headers"]), "admin" if administers else "inference")

    async def _administer(
        self, caller: Caller, scope: Scope, receive: Receive, reply: Reply
    ) -> None:
        assert self.teams is not None
        with self._holding():
            await self.teams.administer(caller, scope, receive, reply)

    async def _charge(
        self, caller: Caller, call: Call, receive: Receive, reply: MeteredReply
    ) -> None:
        """Answer `call` within the limits of the caller, and count it against them."""
        assert self.teams is not None
        tokens = call.tokens if call.path in GENERATING else call.asked.prompt_tokens
        with await self.teams.admit(caller, tokens) as grant:
            reply.headers += [
                (name.encode(), text.encode()) for name, text in grant.headers.items()
            ]
            model, variant = call.labels
            reply.entry = self.teams.ledger.admit(
                caller, model, variant, call.request_id, call.started
            )
            status = CLIENT_LEFT
            try:
                await self._infer(call, receive, reply)
                status = reply.status or status
            except errors.ApiError as error:
                status = error.status
                if not reply.told:
                    grant.settle(0, 0)
                raise
            finally:
                used = reply.usage
                if used.prompt_tokens is not None:
                    grant.settle(used.prompt_tokens, used.output_tokens or 0)
                reply.entry.end(used, status)

    async def _inform(self, path: str, reply: Reply, caller: Caller | None) -> None:
        if path == "/healthz":
            await reply.json(200, {"status": "alive"})
        elif path == "/readyz":
            await self._pool.look()
            await self._readiness(reply)
        elif path == "/metrics":
            await reply.body(200, b"text/plain; version=0.0.4", self._metrics.exposition())
        elif path == "/v1/models":
            cards = [
                self._card(*listed)
                for listed in self._settings.table.names()
                if caller is None or caller.may_use(listed[1].id)
            ]
            await reply.json(200, {"object": "list", "data": cards})
        else:
            name = path.removeprefix("/v1/models/")
            await reply.json(200, self._card(name, *self._resolve(name, None, caller)))

    async def _readiness(self, reply: Reply) -> None:
        states = {
            f"{model.id}@{variant.variant}": self._pool.state(variant.app_name)
            for model in self._settings.table.models
            for variant in model.variants
        }
        ready = bool(states) and all(state.ready for state in states.values())
        variants = {name: state.word for name, state in states.items()}
        reasons = {name: state.unfit for name, state in states.items() if state.unfit}
        more = {"reasons": reasons} if reasons else {}
        await reply.json(200 if ready else 503, {"ready": ready, "variants": variants, **more})

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

    def _resolve(
        self, name: str, variant: str | None, caller: Caller | None
    ) -> tuple[ModelRoute, VariantRoute]:
        try:
            model, route = self._settings.table.resolve(name, variant)
        except UnknownModelError as error:
            raise _unknown(error, name, caller) from None
        _require(caller, model.id)
        return model, route

    async def _read(
        self, scope: Scope, receive: Receive, called: str, started: float, caller: Caller | None
    ) -> Call:
        headers: Headers = dict(scope["headers"])
        check_headers(headers)
        body = await read_body(receive, headers, self._settings.max_body_bytes)
        request = parse(body)
        name = request.get("model")
        if not isinstance(name, str):
            known = ", ".join(m for m in self.models() if caller is None or caller.may_use(m))
            raise errors.model_missing(known or "none")
        asked = read_request(request, headers)
        if caller is not None:
            priority = caller.priority or asked.priority
            asked = replace(asked, tenant=caller.team, priority=priority)
        model, decision, replica = self._choose(name, asked, caller)
        if name != model.id:
            request = {**request, "model": model.id}
            body = json.dumps(request).encode()
        usage = NOTHING
        if caller is not None:
            body, usage = ask_for_usage(scope["path"], request, body)
        return Call(
            path=scope["path"],
            headers=headers,
            body=body,
            request_id=called,
            model=model,
            variant=model.variant(decision.variant),
            asked=asked,
            decision=decision,
            hint=hint_of(model.routing.balancing, request, asked, replica),
            started=started,
            stream=request.get("stream") is True,
            caller=caller,
            usage=usage,
        )

    def _choose(
        self, name: str, asked: RouteRequest, caller: Caller | None
    ) -> tuple[ModelRoute, Decision, str]:
        """The model of this name, which of its variants is to answer, and which replica.

        The last is empty where any replica may.
        """
        try:
            model = self._settings.table.model(name)
            _require(caller, model.id)
            kept = self._kept.find(model.id, asked.previous_response)
            if kept is not None:
                asked = replace(asked, held_by=kept.variant)
            decision = self._router.choose(model, asked, self._loads(model), time.monotonic())
        except UnknownModelError as error:
            raise _unknown(error, name, caller) from None
        wanted = kept is not None and kept.variant == decision.variant
        return model, decision, kept.replica if kept and wanted else ""

    def _loads(self, model: ModelRoute) -> dict[str, Load]:
        """What each variant has to do, as if every gateway process had as much as this one."""
        loads = {}
        for route in model.variants:
            state = self._pool.state(route.app_name)
            running = self._dispatch.running[route.app_name] + self._shadows.running[route.app_name]
            running *= self._settings.gateways
            loads[route.variant] = Load(running, state.running_replicas if state.ready else 0)
        return loads

    def _began(self, call: Call, reply: TimedReply, first: bytes) -> None:
        """Remember who holds a response before the client can ask for its continuation."""
        if call.path != errors.RESPONSES_PATH or reply.status != 200 or not reply.replica:
            return
        told = {name.decode(): value.decode() for name, value in reply.headers}
        variant = told[VARIANT_HEADER]
        # Another model's variant may have answered in its place.
        if told.get(FALLBACK_HEADER) not in (None, f"{call.model.id}@{variant}"):
            return
        if call.model.variant(variant).keeps_responses:
            self._kept.note(call.model.id, Kept(variant, reply.replica), first)

    async def _infer(self, call: Call, receive: Receive, reply: Reply) -> None:
        """Answer `call`, unless the client goes away first; count the outcome."""
        outcome, settings = "disconnect", self._settings
        if call.decision.shadow is not None and call.path in GENERATING:
            second = call.model.variant(call.decision.shadow)
            self._shadows.repeat(replace(call, variant=second), settings)
        work = asyncio.ensure_future(self._dispatch.answer(call, reply, settings))
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
            if isinstance(reply, TimedReply):
                self._splits.add(settings.splits, call, reply, outcome)


def _require(caller: Caller | None, model: str) -> None:
    """Raises ApiError 403 for a model that the caller's key may not use."""
    try:
        if caller is not None:
            require_model(caller, model)
    except ForbiddenError as error:
        raise errors.forbidden(str(error)) from None


def _unknown(error: UnknownModelError, name: str, caller: Caller | None) -> errors.ApiError:
    """A key that may use some models only learns nothing of the others."""
    _require(caller, name.partition("@")[0])
    return errors.unknown_model(str(error))


def _is_below(path: str, start: str) -> bool:
    return path == start or path.startswith(f"{start}/")


def _methods(path: str) -> tuple[str, ...]:
    """The methods `path` takes; none where there is no such path."""
    if path in RELAYED:
        return ("POST",)
    if path in INFORMING or path.startswith("/v1/models/"):
        return ("GET", "HEAD")
    return ()
