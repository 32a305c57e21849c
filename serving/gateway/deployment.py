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
        return self._app

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take a new routing table; requests under way keep their leases."""
        settings = GatewaySettings.model_validate(user_config)
        names = {v.app_name for model in settings.table.models for v in model.variants}
        # In this order, so that there is a handle behind every name at any time.
        await self._pool.add(names)
        self._app.use(settings)
        self._pool.keep_only(names)


def build_gateway(settings: GatewaySettings, **options: Any) -> serve.Application:
    """The gateway's Serve application; `options` are Serve's deployment options."""
    deployment = serve.deployment(
        serve.ingress(None)(_Gateway),
        name="Gateway",
        user_config=settings.model_dump(mode="json"),
        **options,
    )
    return deployment.bind()
