"""The environment that every Ray process of a stack inherits.

Owns Ray Serve's and HAProxy's settings that exist as environment variables only.
Ray Serve reads them when it is imported, so they must be set before.
"""

from __future__ import annotations

import socket
from pathlib import Path

from serving.engines.keys import KEY_FILE_VARIABLE

MARK = "MOE_SERVING_MARK"


def ray_environment(folder: Path, temp: Path) -> dict[str, str]:
    """Variables for a stack whose state is in `folder` and whose sockets are in `temp`."""
    haproxy = temp / "h"
    haproxy.mkdir(parents=True, exist_ok=True, mode=0o700)
    return {
        MARK: str(folder),
        KEY_FILE_VARIABLE: str(folder / "engine.key"),
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # One event loop per replica and gRPC between them: about a third of the
        # CPU time per token of Serve's defaults.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(haproxy / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        # HAProxy is asked for its pid until it answers; Serve's 5 s are short on a busy machine.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
    }


def free_port() -> int:
    """A TCP port of the loopback address that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
