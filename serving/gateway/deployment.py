"""The gateway as a Ray Serve deployment: the ingress of the stack.

Owns the replica's life: it holds the app, and takes settings and routing table
from Serve's `user_config`, so that a changed table needs no restart.
"""

from __future__ import annotations

from typing import Any

from ray import serve

from serving.engines.keys import EngineKeys
from serving.gateway.app import GatewayApp
from serving.gateway.leases import EnginePool
from serving.gateway.settings import GatewaySettings
from serving.telemetry.metrics import GatewayMetrics


class _Gateway:
    def __init__(self) -> None:
        self._pool = EnginePool()
        self._app = GatewayApp(self._pool, EngineKeys.from_environment(), GatewayMetrics())

    async def __serve_build_asgi_app__(self) -> Any:
        settings = self._app.settings
        if not settings.cors_origins:
            return self._app
        from starlette.middleware.cors import CORSMiddleware

        return CORSMiddleware(
            self._app,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take a new routing table; requests under way keep their leases."""
        settings = GatewaySettings.model_validate(user_config)
        variants = [variant for model in settings.table.models for variant in model.variants]
        await self._pool.use(variant.app_name for variant in variants)
        self._app.settings = settings


def build_gateway(settings: GatewaySettings, **options: Any) -> serve.Application:
    """The gateway's Serve application; `options` are Serve's deployment options."""
    deployment = serve.deployment(
        serve.ingress(None)(_Gateway),
        name="Gateway",
        user_config=settings.model_dump(mode="json"),
        **options,
    )
    return deployment.bind()
