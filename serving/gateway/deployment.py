"""The gateway as a Ray Serve deployment: the ingress of the stack.

Owns the replica's life: it holds the app, and takes settings and routing table
from Serve's `user_config`, so that a changed table needs no restart. Requests reach the app
by `ingress`.
"""

from __future__ import annotations

from typing import Any

import ray
from ray import serve

from serving.engines.keys import EngineKeys
from serving.gateway.app import GatewayApp
from serving.gateway.breakers import breakers
from serving.gateway.ingress import Ingress
from serving.gateway.leases import EnginePool
from serving.gateway.settings import GatewaySettings
from serving.gateway.teams import open_teams
from serving.telemetry.metrics import GatewayMetrics


class _Gateway:
    def __init__(self) -> None:
        self._pool = EnginePool()
        self._app = GatewayApp(
            self._pool,
            EngineKeys.from_environment(),
            GatewayMetrics(),
            breakers,
            node=ray.get_runtime_context().get_node_id(),
        )
        Ingress.app = self._app

    async def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take a new routing table; requests under way keep their leases."""
        settings = GatewaySettings.model_validate(user_config)
        balancing = {
            variant.app_name: model.routing.balancing
            for model in settings.table.models
            for variant in model.variants
        }
        if settings.keys and self._app.teams is None:
            self._app.teams = await open_teams(settings.home, self._app.models)
        # In this order, so that there is a handle behind every name at any time.
        await self._pool.add(balancing)
        self._app.use(settings)
        self._pool.keep_only(balancing)

    def __del__(self) -> None:
        """End what outlives requests; Serve calls this when it ends the replica in order."""
        self._app.close()


def build_gateway(settings: GatewaySettings, **options: Any) -> serve.Application:
    """The gateway's Serve application; `options` are Serve's deployment options."""
    deployment = serve.deployment(
        serve.ingress(None)(_Gateway),
        name="Gateway",
        user_config=settings.model_dump(mode="json"),
        **options,
    )
    return deployment.bind()
