"""The environment that every Ray process of a stack inherits.

Owns Ray Serve's and HAProxy's settings that exist as environment variables only.
Ray Serve reads them when it is imported, so they must be set before.
"""

from __future__ import annotations

import socket
import sysconfig
from pathlib import Path

from serving.engines.keys import KEY_FILE_VARIABLE, make_key_file
from serving.gateway import haproxy
from serving.stack.spec import TlsSpec

MARK = "MOE_SERVING_MARK"
# Not imported: it needs starlette, which is where Ray Serve is.
MIDDLEWARES = "serving.gateway.ingress:middlewares"


def ray_environment(folder: Path, temp: Path, tls: TlsSpec | None = None) -> dict[str, str]:
    """Variables for a stack whose state is in `folder` and whose sockets are in `temp`.

    `tls` is the stack file's `gateway.tls`; None serves plain HTTP.
    """
    proxy = temp / "h"
    proxy.mkdir(parents=True, exist_ok=True, mode=0o700)
    certificate = {
        haproxy.CERT_VARIABLE: str(tls.cert_file) if tls else "",
        haproxy.KEY_VARIABLE: str(tls.key_file) if tls else "",
    }
    return {
        MARK: str(folder),
        KEY_FILE_VARIABLE: str(folder / "engine.key"),
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # One event loop per replica and gRPC between them: about a third of the
        # CPU time per token of Serve's defaults.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # In a thread of its own, Serve would queue a reply without bound for a slow client.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": MIDDLEWARES,
        haproxy.BINARY_VARIABLE: str(Path(sysconfig.get_path("scripts")) / "moe-serving-haproxy"),
        **certificate,
        **haproxy_places(proxy),
        # HAProxy is found dead after three checks; Serve's 10 s between them are long without one.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        # HAProxy falls back to this proxy; at 8500 a second stack would find the port taken.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        # A hung engine's requests end with it; Serve would give them the whole drain time.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # Ray would run replicas below everything else on the machine.
        "RAY_worker_niceness": "0",
        # A replica's title may not overwrite its environment: the mark is looked for there.
        "SPT_NOENV": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
    }


def ray_token(file: Path) -> dict[str, str]:
    """Variables that give one Ray cluster a token of its own, made in `file` where none is.

    Whoever reaches Ray's ports could run anything as this user. Given in either
    case, since Ray otherwise decides by whether ~/.ray holds a token.
    """
    make_key_file(file)
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}


def haproxy_places(folder: Path) -> dict[str, str]:
    """Variables that give one HAProxy files in `folder` and ports that no other has."""
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        # HAProxy is asked for its pid until it answers; Serve's 5 s are short on a busy machine.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    }


def free_port() -> int:
    """A TCP port of the loopback address that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
