"""Takes requests past Ray Serve's ingress, straight to the gateway's app.

Serve's ingress wraps every part of every reply, which costs more than the gateway's own relaying.
Serve lets programs stand before it (`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names
`middlewares`); this one does, on the same port, and leaves it what HAProxy asks a replica.
Draining stays Serve's: it closes the port and waits for the requests that run on it.
"""

from __future__ import annotations

from starlette.middleware import Middleware

from serving.engines.keys import AsgiApp, Receive, Scope, Send

# Serve's own paths: whether this replica takes requests, and which.
_SERVES_OWN = "/-/"


class Ingress:
    """Serve's ingress with the gateway's app before it, once this process has one."""

    app: AsgiApp | None = None

    def __init__(self, serves: AsgiApp) -> None:
        self._serves = serves

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        app = Ingress.app
        if app is None or scope["type"] != "http" or scope["path"].startswith(_SERVES_OWN):
            await self._serves(scope, receive, send)
        else:
            await app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """What Serve puts before its HTTP servers, in every process that has one."""
    return [Middleware(Ingress)]
