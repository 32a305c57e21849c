"""Requests to an OpenAI API outside this stack, the last resort of a model's fallbacks.

Owns the client and its key, which is read from its file when it is needed and goes
nowhere else. Leaves when to come here to `dispatch`, and the reply's way to the client to `relay`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from serving.gateway.call import Call
from serving.gateway.engine_http import EngineConnectionError, EngineSilentError
from serving.gateway.request import forwarded
from serving.gateway.settings import GatewaySettings
from serving.router.settings import External

# Of the operator's key, of a name or path that it does not have, of its own limits.
_REFUSALS = frozenset({401, 403, 404, 405, 429})


class ExternalReply:
    """The reply of another server, read like an engine's."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self._response = response
        self._parts = response.aiter_raw()
        self._next: asyncio.Task[bytes] | None = None
        """The read that is under way; a caller that gives up waiting leaves it be."""

    @property
    def content_type(self) -> str:
        """The reply's content type; JSON where it names none."""
        return str(self._response.headers.get("content-type", "application/json"))

    @property
    def content_length(self) -> int | None:
        """The length of the body in bytes, where it was told."""
        length = self._response.headers.get("content-length")
        return int(length) if length is not None else None

    async def read(self, within_s: float | None = None) -> bytes:
        """The next part of the body; b"" at its end.

        Raises EngineConnectionError, EngineSilentError.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._part())
        done, _ = await asyncio.wait({self._next}, timeout=within_s)
        if not done:
            raise EngineSilentError(within_s or 0.0)
        part, self._next = self._next, None
        try:
            return part.result()
        except httpx.HTTPError as error:
            raise EngineConnectionError(f"{type(error).__name__}: {error}") from None

    async def close(self) -> None:
        """End the read that is under way, and the connection where the body was not read."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait({self._next})
        await self._response.aclose()

    async def _part(self) -> bytes:
        return await anext(self._parts, b"")


class ExternalClient:
    """The connections of one gateway process to servers outside."""

    def __init__(self) -> None:
        self._client: httpx.AsyncClient | None = None

    @asynccontextmanager
    async def post(
        self, to: External, call: Call, settings: GatewaySettings
    ) -> AsyncIterator[ExternalReply]:
        """POST the call's body under the model's name there; yields the reply at its head.

        Raises EngineConnectionError, also where the key cannot be used or the server refuses
        the request, which is then not the client's fault; EngineSilentError.
        """
        headers = forwarded(call.headers) | {
            "content-type": "application/json",
            # The reply goes on as it comes, and a client may not read what is packed.
            "accept-encoding": "identity",
            "x-request-id": call.request_id,
        }
        if to.key_file is not None:
            headers["authorization"] = f"Bearer {_key(to.key_file)}"
        client = await self._opened(settings.connect_timeout_s)
        request = client.build_request(
            "POST",
            to.url.rstrip("/").removesuffix("/v1") + call.path,
            headers=httpx.Headers(headers, encoding="latin-1"),
            content=json.dumps({**json.loads(call.body), "model": to.model}).encode(),
        )
        limit_s = settings.first_byte_timeout_s if call.stream else None
        try:
            async with asyncio.timeout(limit_s):
                reply = ExternalReply(await client.send(request, stream=True))
        except TimeoutError:
            raise EngineSilentError(limit_s or 0.0) from None
        except httpx.HTTPError as error:
            raise EngineConnectionError(f"{type(error).__name__}: {error}") from None
        try:
            if reply.status in _REFUSALS:
                raise EngineConnectionError(f"it answers {reply.status}")
            yield reply
        finally:
            await reply.close()

    async def _opened(self, connect_timeout_s: float) -> httpx.AsyncClient:
        if self._client is None:
            timeout = httpx.Timeout(None, connect=connect_timeout_s, pool=connect_timeout_s)
            # Loading the certificates takes some 50 ms.
            self._client = await asyncio.to_thread(httpx.AsyncClient, timeout=timeout)
        return self._client


def _key(file: Path) -> str:
    """The key in `file`; raises EngineConnectionError, which does not repeat it."""
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise EngineConnectionError(f"{file}: {type(error).__name__}") from None
    if not (key and key.isascii() and key.isprintable()):
        raise EngineConnectionError(f"{file} does not hold one line of printable ASCII")
    return key
