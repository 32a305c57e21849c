"""Teams at one gateway process: whose key a request carries, what its limits allow, what it used.

Owns opening the room `teams` in this process, and the shape in which a client is told no. Leaves
keys, limits and the admin API to that room, and calling it at the right time to `app`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, MutableMapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray

from serving.engines.keys import AsgiApp, Receive, Scope, Send
from serving.gateway import errors
from serving.gateway.relay import Reply
from serving.gateway.request import Headers, read_body
from serving.teams.accounts import Accounts
from serving.teams.actor import quota_bank
from serving.teams.admin import admin_app
from serving.teams.authenticate import Authenticator, require_scope
from serving.teams.caller import Caller, KeyScope
from serving.teams.database import Database, database_url, open_database
from serving.teams.errors import ForbiddenError, KeysUnavailableError, UnauthorizedError
from serving.teams.keys import server_secret
from serving.teams.ledger import Ledger, SqlUsageStore
from serving.teams.limiter import Grant, LimitedError, Limiter, LimiterUnavailableError
from serving.teams.quota import Lender
from serving.teams.quota_store import SqlQuotaStore
from serving.teams.spool import Spool
from serving.teams.usage_report import UsageReport

MAX_ADMIN_BODY_BYTES = 64 * 1024


class Teams:
    """The open doors of the room; `open_teams` makes one."""

    def __init__(
        self,
        database: Database,
        secret: bytes,
        lender: Lender,
        ledger: Ledger,
        served: Callable[[], Collection[str]],
    ) -> None:
        """`served` gives the ids of the models that are served now."""
        self._database = database
        self._authenticator = Authenticator(database, secret)
        self._limiter = Limiter(lender)
        self.ledger = ledger
        self._admin: AsgiApp = admin_app(
            lambda key_id: Accounts(database, secret, actor=key_id),
            database,
            served,
            UsageReport(database),
        )
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the keys and keep them fresh from then on, and store what is in the spool."""
        await self.refresh()
        self.ledger.start()
        self._reading = asyncio.create_task(self._authenticator.keep_fresh())

    async def refresh(self) -> None:
        """Read the keys now."""
        await self._authenticator.refresh()

    async def close(self) -> None:
        """Give back what is borrowed, and close the database."""
        if self._reading is not None:
            self._reading.cancel()
            with suppress(asyncio.CancelledError):
                await self._reading
        await self._limiter.close()
        await self.ledger.close()
        await asyncio.to_thread(self._database.close)

    def caller(self, headers: Headers, scope: KeyScope = "inference") -> Caller:
        """Who asks, by the request's headers; raises ApiError 401, 403 or 503."""
        try:
            caller = self._authenticator.authenticate(headers)
            require_scope(caller, scope)
        except UnauthorizedError as error:
            raise errors.unauthorized(str(error)) from None
        except ForbiddenError as error:
            raise errors.forbidden(str(error)) from None
        except KeysUnavailableError as error:
            raise errors.keys_unavailable(str(error)) from None
        return caller

    async def admit(self, caller: Caller, tokens: int) -> Grant:
        """Have a request count against the caller's limits; `tokens` is its estimate.

        Raises ApiError 429 at a limit, 503 where limits cannot be checked.
        """
        try:
            return await self._limiter.admit(caller, tokens)
        except LimitedError as error:
            raise errors.limited(str(error), error.retry_after_s, error.headers) from None
        except LimiterUnavailableError as error:
            raise errors.keys_unavailable(str(error)) from None

    async def administer(
        self, caller: Caller, scope: Scope, receive: Receive, reply: Reply
    ) -> None:
        """Answer a request to the admin API, or for a team's own usage.

        Raises ApiError 413, and Disconnected.
        """
        body = await read_body(receive, dict(scope["headers"]), MAX_ADMIN_BODY_BYTES)
        inner = {**scope, "state": {"caller": caller}}
        await self._admin(inner, _once(body), _through(reply))


async def open_teams(home: Path, served: Callable[[], Collection[str]]) -> Teams:
    """Open the database and the secret of the stack whose state folder is `home`; see `Teams`.

    Raises TeamsError where either is not usable.
    """
    database = await asyncio.to_thread(_open, home)
    secret = await asyncio.to_thread(server_secret, home)
    namespace = ray.get_runtime_context().namespace
    lender = quota_bank(partial(_open_store, home), namespace)
    ledger = Ledger(Spool(home / "usage"), SqlUsageStore(database))
    teams = Teams(database, secret, lender, ledger, served)
    await teams.start()
    return teams


def _open(home: Path) -> Database:
    database = open_database(database_url(home))
    database.prepare()
    return database


def _open_store(home: Path) -> SqlQuotaStore:
    return SqlQuotaStore(_open(home))


def _once(body: bytes) -> Receive:
    """An ASGI `receive` that has this body, and then a client that stays."""
    messages: list[MutableMapping[str, Any]] = [
        {"type": "http.request", "body": body, "more_body": False}
    ]

    async def receive() -> MutableMapping[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    return receive


def _through(reply: Reply) -> Send:
    """An ASGI `send` whose messages go out as this reply's."""

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            kind = headers.pop(b"content-type", b"application/json")
            length = headers.pop(b"content-length", None)
            reply.headers += headers.items()
            await reply.start(message["status"], kind, None if length is None else int(length))
        else:
            await reply.write(message.get("body", b""), more=message.get("more_body", False))

    return send
