"""The gateway's app alone: `python -m serving.studies.capacity.app PORT ENGINE_URL SOCKET`.

The layer below Ray Serve: the gateway's whole way of a request under plain uvicorn, with a pool
that hands the mock engine's endpoint out and asks nobody.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from serving.engines.keys import EngineKeys
from serving.engines.lease import Endpoint
from serving.gateway.app import GatewayApp
from serving.gateway.breakers import breakers
from serving.gateway.leases import EnginePool, EngineState
from serving.gateway.settings import GatewaySettings
from serving.router.balancing import Hint
from serving.router.table import ModelRoute, RoutingTable, VariantRoute
from serving.studies.capacity import wire
from serving.studies.capacity.relay import NODE, serve
from serving.telemetry.metrics import GatewayMetrics

ENGINE_APP = "engine-mock"
VARIANT = "plain"
MAX_MODEL_LEN = 32768
# More than the load's connections: what waits for a slot is not what is measured.
SLOTS = 1024


def settings() -> GatewaySettings:
    """The gateway's defaults, with the mock engine as the one variant of one model."""
    route = VariantRoute(
        variant=VARIANT, app_name=ENGINE_APP, max_model_len=MAX_MODEL_LEN, slots=SLOTS
    )
    model = ModelRoute(id=wire.MODEL, default_variant=VARIANT, variants=(route,))
    return GatewaySettings(table=RoutingTable(models=(model,)))


class OneEngine(EnginePool):
    """A pool of leases that asks nobody: one engine, always ready, at once."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__()
        self._endpoint = endpoint

    def state(self, app_name: str) -> EngineState:
        """Running, whichever is asked for."""
        return EngineState(1, "RUNNING")

    async def look(self) -> None:
        """Nothing changes."""

    @asynccontextmanager
    async def lease(
        self,
        app_name: str,
        model: str,
        queue_timeout_s: float,
        hint: Hint,
        wake_timeout_s: float = 0.0,
    ) -> AsyncIterator[Endpoint]:
        """The one endpoint."""
        yield self._endpoint


def main() -> None:
    """Serve until SIGTERM."""
    port, url, socket = sys.argv[1:]
    pool = OneEngine(Endpoint(url, "mock", "lease", NODE, socket))
    keys, metrics = EngineKeys(("key",)), GatewayMetrics()
    app = GatewayApp(pool, keys, metrics, breakers, node=NODE)
    app.use(settings())
    serve(app, int(port))


if __name__ == "__main__":
    main()
