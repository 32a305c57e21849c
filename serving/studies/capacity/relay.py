"""A bare relay: `python -m serving.studies.capacity.relay PORT ENGINE_URL SOCKET`.

What the gateway is measured against: uvicorn (httptools, uvloop), one raw ASGI function, and
the client to engines that the gateway itself uses, over the same unix socket. It parses no
request, holds no lease, counts nothing and does not mind how a stream ends: what is left is
uvicorn and two connections.
"""

from __future__ import annotations

import sys

import uvicorn

from serving.engines.keys import AsgiApp, Receive, Scope, Send
from serving.engines.lease import Endpoint
from serving.gateway.engine_http import EngineClient

NODE = "here"
CONNECT_TIMEOUT_S = 5.0


def main() -> None:
    """Serve until SIGTERM."""
    port, url, socket = sys.argv[1:]
    serve(BareRelay(Endpoint(url, "mock", "", NODE, socket)), int(port))


def serve(app: AsgiApp, port: int) -> None:
    """Run an ASGI app under uvicorn on a loopback port until SIGTERM."""
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=port,
        http="httptools",
        loop="uvloop",
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
    )


class BareRelay:
    """Sends every POST to one endpoint and copies what comes back."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._engine = EngineClient(NODE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay one request."""
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        headers = {"content-type": "application/json"}
        async with self._engine.post(
            self._endpoint, scope["path"], headers, body, CONNECT_TIMEOUT_S
        ) as reply:
            told = [(b"content-type", reply.content_type.encode("latin-1"))]
            if reply.content_length is not None:
                told.append((b"content-length", str(reply.content_length).encode()))
            await send({"type": "http.response.start", "status": reply.status, "headers": told})
            while chunk := await reply.read():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


if __name__ == "__main__":
    main()
