"""The stack's own random key, which engine ports demand.

Owns where the key comes from, how it is made and the check. A key file holds
one key a line: the first is sent, all are accepted, so that a key is rolled by
writing the new one below the old, then above it, then alone. The key is never
logged or shown.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

ENGINE_KEY_HEADER = "x-moe-serving-engine-key"
KEY_VARIABLE = "MOE_SERVING_ENGINE_KEY"
KEY_FILE_VARIABLE = "MOE_SERVING_ENGINE_KEY_FILE"
# Kubernetes and load balancers probe without a key; it tells nothing but alive or not.
OPEN_PATHS = frozenset({"/health"})

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class EngineKeyError(RuntimeError):
    """No engine key is configured, or its file cannot be used."""


class EngineKeys:
    """The keys of this process, given as they are or read from a file that may change.

    Raises EngineKeyError where there is no key to start with.
    """

    def __init__(self, keys: tuple[str, ...] = (), file: Path | None = None) -> None:
        self._keys = keys
        self._file = file
        self._load()

    @classmethod
    def from_environment(cls) -> EngineKeys:
        """Keys from `MOE_SERVING_ENGINE_KEY` (comma-separated) or `MOE_SERVING_ENGINE_KEY_FILE`.

        Raises EngineKeyError where neither is set or the one set holds no key.
        """
        if value := os.environ.get(KEY_VARIABLE):
            keys = _split(value.replace(",", "\n"))
            if not keys:
                raise EngineKeyError(
                    f"{KEY_VARIABLE} holds no key: write one or more, with commas between them, "
                    f"or unset it and name a file in {KEY_FILE_VARIABLE}"
                )
            return cls(keys=keys)
        if path := os.environ.get(KEY_FILE_VARIABLE):
            return cls(file=Path(path))
        raise EngineKeyError(
            f"no engine key: set {KEY_VARIABLE} or {KEY_FILE_VARIABLE} for every Ray process"
        )

    def current(self) -> str:
        """The key to send."""
        return self._load()[0]

    def accepts(self, offered: bytes) -> bool:
        """Whether `offered` is one of the keys; every key is compared, in constant time."""
        matches = [hmac.compare_digest(offered, key.encode()) for key in self._load()]
        return any(matches)

    def _load(self) -> tuple[str, ...]:
        """The keys now: a file caught empty or away while it is rewritten leaves the last ones.

        The file is read each time, since a rewrite may keep size and modification time.
        """
        problem = "no key was given"
        if self._file is not None:
            problem = f"engine key file {self._file} holds no key"
            try:
                self._keys = _split(self._file.read_text(encoding="ascii")) or self._keys
            except (OSError, UnicodeDecodeError) as error:
                problem = f"engine key file {self._file}: {error}"
        if not self._keys:
            raise EngineKeyError(problem)
        return self._keys


def make_key_file(path: Path) -> None:
    """Write a fresh 256-bit key to `path`, readable by its owner only, unless a file is there."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_urlsafe(32) + "\n")


def _split(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.splitlines() if line.strip())


class EngineKeyMiddleware:
    """Refuses every request without the stack's key, but for the health check.

    vLLM's own `api_key` guards some paths only: `/invocations`, `/tokenize` and
    `/metrics` would stay open.
    """

    def __init__(self, app: AsgiApp, keys: EngineKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "lifespan" or scope.get("path") in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        offered = dict(scope["headers"]).get(ENGINE_KEY_HEADER.encode(), b"")
        if scope["type"] == "http" and self._keys.accepts(offered):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _refuse(send)
        else:
            await send({"type": "websocket.close", "code": 1008})


async def _refuse(send: Send) -> None:
    body = (
        b'{"error": {"message": "this port serves the stack\'s gateway only; send requests to '
        b'the gateway", "type": "authentication_error", "param": null, "code": "engine_key"}}'
    )
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
