"""The gateway as deployed: `python -m serving.studies.capacity.deployed SETTINGS`.

Owns a Ray cluster of its own with Serve, HAProxy, the gateway's deployment and a deployment that
grants leases on the mock engine; SETTINGS is a file with `DeployedSettings` as JSON. Where
each layer is reached is written to `ports_file` once everything runs. SIGTERM ends this program
at once; its cluster is ended by whoever started it, who finds every process by a mark.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions

from serving.engines.lease import Endpoint
from serving.gateway.deployment import build_gateway
from serving.router.balancing import Hint
from serving.stack.gateway_plan import GATEWAY_APP
from serving.stack.spec import GatewaySpec
from serving.studies.capacity.app import ENGINE_APP, SLOTS, settings
from serving.studies.capacity.ports import DeployedSettings, Ports

READY_WITHIN_S = 120.0


class MockEngine:
    """Grants leases on the mock engine, with the methods that the gateway calls on an engine."""

    def __init__(self, url: str, socket: str) -> None:
        self._url, self._socket = url, socket
        self._replica: str = serve.get_replica_context().replica_id.unique_id
        self._node: str = ray.get_runtime_context().get_node_id()

    async def unfit(self) -> str:
        """Always fit."""
        return ""

    async def lease(self, hint: Hint | None = None) -> AsyncIterator[Endpoint]:
        """Yield the mock's endpoint, then hold the slot until the gateway lets go of it.

        The engine that the others share cannot tell this process when a request has ended.
        """
        yield Endpoint(self._url, self._replica, "lease", self._node, self._socket)
        await asyncio.Event().wait()


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    given = DeployedSettings.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # "local": never another cluster of this machine.
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=given.temp,
    )
    # Ray's own handler, set by ray.init, would wait for a cluster that is ending, too.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _serve(given)
    config = _haproxy_config(Path(given.haproxy_folder))
    ports = Ports(deployed=given.port, replica=replica_port(config))
    Path(given.ports_file).write_text(ports.model_dump_json())
    signal.pause()


def _serve(given: DeployedSettings) -> None:
    serve.start(
        proxy_location="HeadOnly",
        http_options=HTTPOptions(host="127.0.0.1", port=given.port),
    )
    engine = serve.deployment(
        MockEngine,
        name="MockEngine",
        max_ongoing_requests=SLOTS,
        ray_actor_options={"num_cpus": 0},
    )
    serve.run(
        engine.bind(given.engine_url, given.engine_socket), name=ENGINE_APP, route_prefix=None
    )
    spec = GatewaySpec()
    options: dict[str, Any] = {
        "num_replicas": spec.replicas,
        "max_ongoing_requests": spec.max_ongoing_requests,
        "ray_actor_options": {"num_cpus": 0},
    }
    serve.run(build_gateway(settings(), **options), name=GATEWAY_APP, route_prefix="/")


def _haproxy_config(folder: Path) -> str:
    """HAProxy's configuration, as soon as it has the gateway in it."""
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        for file in folder.glob("*/haproxy.cfg"):
            text = file.read_text()
            # Not before the stack's wrapper has edited what Serve wrote.
            if _SERVER.search(text) and "proto h1" in text:
                return text
        time.sleep(0.2)
    raise TimeoutError(f"HAProxy did not learn of the gateway within {READY_WITHIN_S:.0f} s")


_SERVER = re.compile(r"^( *server (?!.*backup)\S+ )127\.0\.0\.1:(\d+)", re.M)


def replica_port(config: str) -> int:
    """The port of the one gateway replica that Serve's HAProxy sends requests to."""
    found = _SERVER.search(config)
    assert found is not None, config
    return int(found[2])


if __name__ == "__main__":
    # By its name, so that Ray's workers import the deployments' classes from here, too.
    from serving.studies.capacity.deployed import main as run

    run()
