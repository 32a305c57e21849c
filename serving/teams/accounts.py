"""Teams, their keys and the prices of models: making, changing and listing them.

Every change and its audit entry are one transaction. Owns what names, scopes and durations may
be. Leaves the form of a key to `keys`, and deciding on requests to `authenticate`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import sqlalchemy as sa
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.exc import IntegrityError

from serving.router.request import Priority
from serving.teams import tables
from serving.teams.audit import LOCAL, AuditEntry, record
from serving.teams.caller import KeyScope, Limits
from serving.teams.database import Database
from serving.teams.errors import TeamsError, UnknownNameError
from serving.teams.keys import digest, id_of, mint

OVERLAP_S = 86_400.0
"""How long a rotated key stays valid beside the new one."""
_UNLIMITED = Limits()
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DURATION = re.compile(r"([1-9][0-9]{0,5})([smhdw])")
_MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,254}")
ModelId = Annotated[str, Field(pattern=f"^{_MODEL_ID.pattern}$")]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LONGEST_S = 100 * 365 * 86_400.0
"""The longest duration; what is meant to last for ever names none."""
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@dataclass(frozen=True, slots=True)
class Team:
    """Who shares limits, a priority and a bill."""

    name: str
    priority: Priority | None
    limits: Limits
    created: float
    """Unix time."""


class TeamChange(BaseModel):
    """What to change of a team: only what is given; None takes a limit or the priority away."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    priority: Priority | None = None
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True)
class Key:
    """A key as it is listed; the key itself is known to whoever was given it."""

    id: str
    team: str
    name: str
    scopes: frozenset[KeyScope]
    models: frozenset[str] | None
    """Ids of the models it may use; None: all."""
    limits: Limits
    created: float
    """Unix time, as the other times."""
    expires: float | None
    revoked_at: float | None
    replaced_by: str | None
    """Id of the key that it was rotated to."""

    def state(self, now: float) -> str:
        """`live`, `rotated` (valid for now), `revoked` or `expired`."""
        if self.revoked_at is not None:
            return "revoked"
        if self.expires is not None and self.expires <= now:
            return "expired"
        return "live" if self.replaced_by is None else "rotated"


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that was just made, with the one sight of it."""

    key: Key
    text: str = field(repr=False)


class KeyGrant(BaseModel):
    """What a new key is to be allowed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scopes: frozenset[KeyScope] = Field(default=frozenset({"inference"}), min_length=1)
    models: frozenset[ModelId] | None = Field(default=None, min_length=1)
    """Ids of the models it may use; None: all."""
    limits: Limits = Limits()
    expires_in_s: float | None = Field(default=None, gt=0, le=LONGEST_S, allow_inf_nan=False)


class Price(BaseModel):
    """What a million tokens of each kind cost, in the operator's own currency."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: Amount
    cached: Amount
    output: Amount


class Accounts:
    """Teams, keys and prices in a database, on behalf of `actor` (a key's id, or `local`).

    Methods block, and raise TeamsError where they cannot do what is asked.
    """

    def __init__(
        self,
        database: Database,
        secret: bytes,
        actor: str = LOCAL,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._secret = secret
        self._actor = actor
        self._now = now

    # --- teams -----------------------------------------------------------------------------

    def create_team(
        self, name: str, priority: Priority | None = None, limits: Limits = _UNLIMITED
    ) -> Team:
        """Make a team; raises TeamsError for a name that is taken or cannot be one."""
        _check_name("team", name)
        team = Team(name, priority, limits, self._now())
        described = {"priority": priority, "limits": _stored(limits)}
        with self._database.write() as connection:
            try:
                connection.execute(
                    sa.insert(tables.teams).values(name=name, created=team.created, **described)
                )
            except IntegrityError:
                raise TeamsError(
                    f"team: {name!r} is there already; change it with "
                    f"`moe-serving teams set {name}`"
                ) from None
            self._record(connection, "team.create", name, described)
        return team

    def change_team(self, name: str, change: TeamChange) -> Team:
        """Change what `change` gives of a team; raises UnknownNameError where there is none."""
        given = change.model_dump(exclude_unset=True)
        with self._database.write() as connection:
            team = _find_team(connection, name, lock=True)
            limits = team.limits.model_copy(update=given.get("limits", {}))
            priority = given.get("priority", team.priority)
            connection.execute(
                sa.update(tables.teams)
                .where(tables.teams.c.name == name)
                .values(limits=_stored(limits), priority=priority)
            )
            self._record(connection, "team.change", name, given)
        return Team(name, priority, limits, team.created)

    def team(self, name: str) -> Team:
        """The team of this name; raises UnknownNameError."""
        with self._database.read() as connection:
            return _find_team(connection, name)

    def list_teams(self) -> tuple[Team, ...]:
        """All teams, by name."""
        with self._database.read() as connection:
            rows = connection.execute(sa.select(tables.teams).order_by(tables.teams.c.name))
            return tuple(_team(row) for row in rows)

    # --- keys ------------------------------------------------------------------------------

    def create_key(self, team: str, name: str, grant: KeyGrant | None = None) -> NewKey:
        """Make a key of a team; its text is nowhere but in what is returned.

        Raises UnknownNameError where there is no such team, TeamsError for a name that is none.
        """
        _check_name("name", name)
        with self._database.write() as connection:
            _find_team(connection, team)
            new = self._insert_key(connection, team, name, grant or KeyGrant())
            self._record(connection, "key.create", new.key.id, described(new.key))
        return new

    def list_keys(self, team: str | None = None) -> tuple[Key, ...]:
        """The keys of one team or of all, revoked and expired ones included, by team and age."""
        query = sa.select(tables.keys).order_by(tables.keys.c.team, tables.keys.c.created)
        if team is not None:
            query = query.where(tables.keys.c.team == team)
        with self._database.read() as connection:
            if team is not None:
                _find_team(connection, team)
            return tuple(_key(row) for row in connection.execute(query))

    def revoke_key(self, key_id: str) -> Key:
        """End a key now; one that is revoked already stays as it is.

        Raises UnknownNameError where there is none of this id.
        """
        with self._database.write() as connection:
            key = _find_key(connection, key_id)
            if key.revoked_at is None:
                _update_key(connection, key_id, revoked_at=self._now())
                self._record(connection, "key.revoke", key_id, {"team": key.team})
            return _find_key(connection, key_id)

    def rotate_key(self, key_id: str, overlap_s: float = OVERLAP_S) -> NewKey:
        """Make a key that may what this one may; the old one ends after `overlap_s` seconds.

        The new one lasts as long from now as the old one was made for. Raises UnknownNameError,
        and TeamsError for a key that is no longer valid or was rotated already.
        """
        if not 0 <= overlap_s <= LONGEST_S:
            raise TeamsError(f"overlap: found {overlap_s:g} s; give 0 or more, for instance 24h")
        now = self._now()
        with self._database.write() as connection:
            old = _find_key(connection, key_id)
            state = old.state(now)
            if state != "live":
                by = f" (to {old.replaced_by})" if state == "rotated" else ""
                raise TeamsError(
                    f"key: {key_id} is {state}{by}; make a new one with "
                    f"`moe-serving keys create --team {old.team} --name {old.name}`"
                )
            lasts = None if old.expires is None else old.expires - old.created
            grant = KeyGrant(
                scopes=old.scopes, models=old.models, limits=old.limits, expires_in_s=lasts
            )
            new = self._insert_key(connection, old.team, old.name, grant)
            ends = now + overlap_s
            if old.expires is not None:
                ends = min(ends, old.expires)
            _update_key(connection, key_id, expires=ends, replaced_by=new.key.id)
            detail = {"replaced_by": new.key.id, "expires": ends}
            self._record(connection, "key.rotate", key_id, detail)
        return new

    def _insert_key(
        self, connection: sa.Connection, team: str, name: str, grant: KeyGrant
    ) -> NewKey:
        text, now = mint(), self._now()
        expires = None if grant.expires_in_s is None else now + grant.expires_in_s
        key = Key(
            id=id_of(text),
            team=team,
            name=name,
            scopes=grant.scopes,
            models=grant.models,
            limits=grant.limits,
            created=now,
            expires=expires,
            revoked_at=None,
            replaced_by=None,
        )
        hashed = digest(self._secret, text.encode()).hex()
        row = {"id": key.id, "digest": hashed, "created": now, **described(key)}
        connection.execute(sa.insert(tables.keys).values(row))
        return NewKey(key, text)

    # --- prices ----------------------------------------------------------------------------

    def set_price(self, model: str, price: Price) -> None:
        """Set what a model's tokens cost from now on; the ledger keeps what was written before.

        Raises TeamsError for what cannot be a model's id.
        """
        if not _MODEL_ID.fullmatch(model):
            raise TeamsError(f"model: found {model[:40]!r}; write its id, as /v1/models lists it")
        with self._database.write() as connection:
            connection.execute(sa.delete(tables.prices).where(tables.prices.c.model == model))
            values = {"model": model, **price.model_dump()}
            connection.execute(sa.insert(tables.prices).values(values))
            self._record(connection, "price.set", model, price.model_dump())

    def list_prices(self) -> Mapping[str, Price]:
        """Prices by model."""
        columns = tables.prices.c
        query = sa.select(columns.model, columns.input, columns.cached, columns.output)
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(columns.model)).all()
        return {row[0]: Price(input=row[1], cached=row[2], output=row[3]) for row in rows}

    def _record(
        self, connection: sa.Connection, act: str, subject: str, detail: Mapping[str, Any]
    ) -> None:
        record(connection, AuditEntry(self._now(), self._actor, act, subject, detail))


def parse_duration(field_name: str, text: str) -> float:
    """Seconds of a duration such as `90d`; raises TeamsError that names the field."""
    found = _DURATION.fullmatch(text)
    seconds = float(int(found[1]) * _UNITS_S[found[2]]) if found else 0.0
    if not 0 < seconds <= LONGEST_S:
        raise TeamsError(
            f"{field_name}: found {text[:40]!r}; write a number and s, m, h, d or w, "
            "for instance 90d, and 100 years at most"
        )
    return seconds


def _find_key(connection: sa.Connection, key_id: str) -> Key:
    """The key, which nobody else changes until the transaction ends."""
    query = sa.select(tables.keys).where(tables.keys.c.id == key_id).with_for_update()
    # Databases refuse some characters with an error of their own.
    row = connection.execute(query).one_or_none() if _NAME.fullmatch(key_id) else None
    if row is None:
        raise UnknownNameError(
            f"key: there is none with the id {key_id[:40]!r}; `moe-serving keys list` has them"
        )
    return _key(row)


def _key(row: Any) -> Key:
    return Key(
        id=row.id,
        team=row.team,
        name=row.name,
        scopes=frozenset(row.scopes),
        models=None if row.models is None else frozenset(row.models),
        limits=Limits(**row.limits),
        created=row.created,
        expires=row.expires,
        revoked_at=row.revoked_at,
        replaced_by=row.replaced_by,
    )


def _update_key(connection: sa.Connection, key_id: str, **values: object) -> None:
    connection.execute(sa.update(tables.keys).where(tables.keys.c.id == key_id).values(**values))


def _find_team(connection: sa.Connection, name: str, *, lock: bool = False) -> Team:
    """The team; where locked, nobody else changes it until the transaction ends."""
    query = sa.select(tables.teams).where(tables.teams.c.name == name)
    if lock:
        query = query.with_for_update()
    row = connection.execute(query).one_or_none() if _NAME.fullmatch(name) else None
    if row is None:
        raise UnknownNameError(
            f"team: there is none of the name {name[:40]!r}; `moe-serving teams list` has them, "
            "`moe-serving teams create` makes one"
        )
    return _team(row)


def _team(row: Any) -> Team:
    return Team(row.name, row.priority, Limits(**row.limits), row.created)


def described(key: Key) -> dict[str, Any]:
    """What is told of a key when it is made: in its row, in the audit log and to who asks."""
    return {
        "team": key.team,
        "name": key.name,
        "scopes": sorted(key.scopes),
        "models": None if key.models is None else sorted(key.models),
        "limits": _stored(key.limits),
        "expires": key.expires,
    }


def _stored(limits: Limits) -> dict[str, int]:
    return limits.model_dump(exclude_none=True)


def _check_name(field_name: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise TeamsError(
            f"{field_name}: found {name[:40]!r}; write up to 64 letters, digits, dots, dashes and "
            "underscores, a letter or digit first"
        )
