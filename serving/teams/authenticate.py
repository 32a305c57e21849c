"""Whose key a request carries: decided in memory, from a copy of the keys that is kept fresh.

A request costs one HMAC and a look into a dictionary, never a call to the database. Leaves keys
and teams to `accounts`, and 401, 403 and 503 to the gateway.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf

import sqlalchemy as sa

from serving.router.request import Priority
from serving.teams import tables
from serving.teams.caller import Caller, KeyScope, Limits
from serving.teams.database import Database
from serving.teams.errors import ForbiddenError, KeysUnavailableError, UnauthorizedError
from serving.teams.keys import KEY_LENGTH, digest, well_formed

logger = logging.getLogger("ray.serve")

REFRESH_S = 2.0
"""How long a change of a key may take to be seen."""
# What is hashed where no key came, so that it takes as long.
_NO_KEY = b"-" * KEY_LENGTH


@dataclass(frozen=True, slots=True)
class _Known:
    """A key that was neither revoked nor expired when it was read."""

    digest: bytes
    caller: Caller
    expires: float


_NOBODY = _Known(bytes(32), Caller("", "", frozenset(), frozenset(), None), -inf)


class Authenticator:
    """The keys of one gateway process; `now` is Unix time.

    A database that fails leaves the last keys in force, so that it may be away for a while; what
    was revoked since stays valid as long.
    """

    def __init__(
        self,
        database: Database,
        secret: bytes,
        refresh_s: float = REFRESH_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._secret = secret
        self._refresh_s = refresh_s
        self._now = now
        self._known: dict[bytes, _Known] | None = None
        self._failing = False

    async def refresh(self) -> None:
        """Read the keys now, in a thread; what fails leaves the last ones, and is logged once."""
        try:
            self._known = await asyncio.to_thread(_read, self._database, self._now())
        except Exception as error:
            # Whatever it is, a task that keeps keys fresh must go on.
            if not self._failing:
                logger.error("keys stay as they were last read: %s", error)
            self._failing = True
        else:
            if self._failing:
                logger.warning("keys are read from the database again")
            self._failing = False

    async def keep_fresh(self) -> None:
        """Read the keys again and again, until this is cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(self._refresh_s)

    def authenticate(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Who sends a request with these headers (names in lower case, as ASGI has them).

        Takes `Authorization: Bearer` and, where there is none, `x-api-key`. Raises
        UnauthorizedError, with one text and after the same work whatever is wrong, and
        KeysUnavailableError where no key could be read yet.
        """
        if self._known is None:
            raise KeysUnavailableError("keys cannot be checked now; try again in a moment")
        offered = _offered(headers)
        hashed = digest(self._secret, offered if well_formed(offered) else _NO_KEY)
        # Who does not know the secret cannot choose a digest, so how long the look takes tells
        # nothing of those that are there.
        known = self._known.get(hashed, _NOBODY)
        matches = hmac.compare_digest(known.digest, hashed)
        if not matches or known.expires <= self._now():
            raise UnauthorizedError(
                "no valid API key; send one as `Authorization: Bearer KEY` or `x-api-key: KEY`"
            )
        return known.caller


def require_scope(caller: Caller, scope: KeyScope) -> None:
    """Raises ForbiddenError unless the caller's key has the scope."""
    if scope not in caller.scopes:
        raise ForbiddenError("this API key may not be used for that; ask for one that may")


def require_model(caller: Caller, model: str) -> None:
    """Raises ForbiddenError unless the caller's key may use the model of this id."""
    if not caller.may_use(model):
        allowed = ", ".join(sorted(caller.models or ()))
        raise ForbiddenError(f"this API key may use these models only: {allowed}")


def _offered(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return token.strip()
    return headers.get(b"x-api-key", b"").strip()


def _read(database: Database, now: float) -> dict[bytes, _Known]:
    """Every key that is valid at `now`, by its digest."""
    keys, teams = tables.keys.c, tables.teams.c
    query = (
        sa.select(
            keys.digest,
            keys.id,
            keys.team,
            keys.expires,
            teams.priority,
            *(
                sa.cast(column, sa.Text)
                for column in (keys.scopes, keys.models, keys.limits, teams.limits)
            ),
        )
        .join_from(tables.keys, tables.teams, keys.team == teams.name)
        .where(keys.revoked_at.is_(None))
        .where(keys.expires.is_(None) | (keys.expires > now))
    )
    with database.read() as connection:
        rows = connection.execute(query).all()
    return {known.digest: known for known in (_known(*row) for row in rows)}


# Between two reads hardly a row changes, and to parse them all would hold up the event loop.
@lru_cache(maxsize=65_536)
def _known(
    hashed: str,
    key_id: str,
    team: str,
    expires: float | None,
    priority: Priority | None,
    scopes: str,
    models: str | None,
    key_limits: str,
    team_limits: str,
) -> _Known:
    caller = Caller(
        team=team,
        key_id=key_id,
        scopes=frozenset(json.loads(scopes)),
        models=None if models is None else frozenset(json.loads(models)),
        priority=priority,
        team_limits=Limits.model_validate_json(team_limits),
        key_limits=Limits.model_validate_json(key_limits),
    )
    return _Known(bytes.fromhex(hashed), caller, inf if expires is None else expires)
