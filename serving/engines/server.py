"""An engine replica's own HTTP server: one app, on a TCP port and on a unix socket.

Owns both sockets. The unix socket is for gateways on the same node, where it takes less
CPU time than TCP; whatever guards the app guards it on both. Leaves the app to `vllm`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import tempfile
from collections.abc import Iterator

import uvicorn

from serving.engines.keys import AsgiApp

logger = logging.getLogger("ray.serve")


class EngineServer(uvicorn.Server):
    """uvicorn on the replica's event loop; Serve, not uvicorn, handles signals.

    `url` is the base URL without trailing slash; `socket_path` the unix socket's, in a folder of
    its own under `folder` that its owner alone can enter. None where the system makes no such
    socket, as with a path over 107 bytes.
    """

    def __init__(self, app: AsgiApp, host: str, folder: str) -> None:
        super().__init__(
            uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=75)
        )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        port = socket.create_server((host, 0), family=family)
        self._sockets = [port]
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{port.getsockname()[1]}"
        self._folder = tempfile.TemporaryDirectory(prefix="engine-", dir=folder)
        self.socket_path: str | None = f"{self._folder.name}/http"
        unix = socket.socket(socket.AF_UNIX)
        try:
            unix.bind(self.socket_path)
        except OSError as error:
            unix.close()
            logger.warning("no unix socket at %s: %s", self.socket_path, error)
            self.socket_path = None
        else:
            self._sockets.append(unix)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to Serve."""
        yield

    async def start(self) -> None:
        """Return when both sockets take requests."""
        self._task = asyncio.create_task(self.serve(self._sockets))
        while not self.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the engine's HTTP server did not start")
            await asyncio.sleep(0.01)

    def remove_socket(self) -> None:
        """Remove the unix socket; requests that run on it go on."""
        self._folder.cleanup()
