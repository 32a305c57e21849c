"""The operations of the admin API and of /v1/usage.

Leaves what they take and give to `admin_values`, lists to `admin_pages`, errors to `admin_errors`,
the app around them to `admin` and all decisions to `accounts`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Protocol

import sqlalchemy as sa
from fastapi import APIRouter, Body, Depends, Path, Query, Request

from serving.teams import tables
from serving.teams.accounts import Accounts, ModelId, TeamChange
from serving.teams.admin_errors import UnknownModelError, told
from serving.teams.admin_pages import Page, PageQuery, first_of, page
from serving.teams.admin_values import (
    AuditQuery,
    AuditValue,
    By,
    KeyRequest,
    KeysQuery,
    KeyValue,
    NewKeyValue,
    NewPrice,
    NewTeam,
    OwnUsageQuery,
    PriceValue,
    Rotation,
    TeamPatch,
    TeamValue,
    UsageQuery,
    UsageValue,
    key_value,
    new_key_value,
)
from serving.teams.authenticate import require_model
from serving.teams.caller import Caller
from serving.teams.database import Database


class Report(Protocol):
    """What requests used, added up."""

    def __call__(
        self,
        *,
        team: str | None,
        by: By,
        since: float | None,
        until: float | None,
        models: Collection[str] | None,
    ) -> Sequence[UsageValue]:
        """The sums of `since` (Unix seconds) and later, before `until`; None: of all.

        Blocks; raises StoreError.
        """


@dataclass(frozen=True, slots=True)
class Services:
    """What the operations work with; their calls block, but for `served` and `now`."""

    accounts: Callable[[str], Accounts]
    """Those that act in the name of the key with this id."""
    database: Database
    served: Callable[[], Collection[str]]
    """Ids of the models served now."""
    report: Report | None
    now: Callable[[], float]
    """Unix time."""


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


async def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


Behind = Annotated[Services, Depends(_services)]
Asking = Annotated[Caller, Depends(_caller)]


async def _acting(behind: Behind, caller: Asking) -> Accounts:
    return behind.accounts(caller.key_id)


Acting = Annotated[Accounts, Depends(_acting)]
TeamName = Annotated[str, Path(description="name of the team")]
KeyId = Annotated[str, Path(description="the 8 characters after `msk_`")]
_A_DAY = Rotation()

admin = APIRouter(prefix="/admin")
usage = APIRouter(tags=["usage"])


# --- teams -----------------------------------------------------------------------------------


@admin.get("/teams", tags=["teams"], summary="List teams", responses=told(400, 404))
def list_teams(accounts: Acting, query: Annotated[PageQuery, Query()]) -> Page[TeamValue]:
    """All teams with their limits, by name."""
    return page(accounts.list_teams(), lambda team: team.name, TeamValue.of, query)


@admin.post(
    "/teams", tags=["teams"], status_code=201, summary="Make a team", responses=told(400, 409)
)
def create_team(accounts: Acting, team: NewTeam) -> TeamValue:
    """A team without limits, but for those given."""
    return TeamValue.of(accounts.create_team(team.name, team.priority, team.limits.limits()))


@admin.get("/teams/{team}", tags=["teams"], summary="Get a team", responses=told(404))
def get_team(accounts: Acting, team: TeamName) -> TeamValue:
    """One team with its limits."""
    return TeamValue.of(accounts.team(team))


@admin.patch("/teams/{team}", tags=["teams"], summary="Change a team", responses=told(400, 404))
def change_team(accounts: Acting, team: TeamName, change: TeamPatch) -> TeamValue:
    """Change what is given of limits and priority, and leave the rest; null takes one away."""
    given = TeamChange.model_validate(change.model_dump(exclude_unset=True))
    return TeamValue.of(accounts.change_team(team, given))


# --- keys ------------------------------------------------------------------------------------


@admin.get("/keys", tags=["keys"], summary="List keys", responses=told(400, 404))
def list_keys(
    accounts: Acting, behind: Behind, query: Annotated[KeysQuery, Query()]
) -> Page[KeyValue]:
    """Keys by team and age, revoked and expired ones included; never the keys themselves."""
    keys = accounts.list_keys(query.team)
    return page(keys, lambda key: key.id, partial(key_value, now=behind.now()), query)


@admin.post("/keys", tags=["keys"], status_code=201, summary="Make a key", responses=told(400, 404))
def create_key(accounts: Acting, behind: Behind, key: KeyRequest) -> NewKeyValue:
    """A key of a team; the reply holds it this once."""
    new = accounts.create_key(key.team, key.name, key.grant())
    return new_key_value(new, behind.now())


@admin.post("/keys/{key}/revoke", tags=["keys"], summary="Revoke a key", responses=told(404))
def revoke_key(accounts: Acting, behind: Behind, key: KeyId) -> KeyValue:
    """End a key; gateways refuse it within seconds. One that is revoked stays as it is."""
    return key_value(accounts.revoke_key(key), behind.now())


@admin.post(
    "/keys/{key}/rotate",
    tags=["keys"],
    status_code=201,
    summary="Rotate a key",
    responses=told(400, 404, 409),
)
def rotate_key(
    accounts: Acting, behind: Behind, key: KeyId, rotation: Annotated[Rotation, Body()] = _A_DAY
) -> NewKeyValue:
    """Make a key that may what this one may, which stays valid for a while."""
    return new_key_value(accounts.rotate_key(key, rotation.overlap_s), behind.now())


# --- prices and the audit log ------------------------------------------------------------------


@admin.get("/prices", tags=["prices"], summary="List prices", responses=told(400, 404))
def list_prices(accounts: Acting, query: Annotated[PageQuery, Query()]) -> Page[PriceValue]:
    """What a million tokens cost, by model."""
    prices = tuple(accounts.list_prices().items())
    return page(prices, lambda priced: priced[0], lambda priced: PriceValue.of(*priced), query)


@admin.put("/prices/{model:path}", tags=["prices"], summary="Set a price", responses=told(400))
def set_price(
    accounts: Acting, model: Annotated[ModelId, Path(description="a model's id")], price: NewPrice
) -> PriceValue:
    """What a model's tokens cost from now on; usage until now keeps its cost."""
    accounts.set_price(model, price.price())
    return PriceValue.of(model, price.price())


@admin.get("/audit", tags=["audit"], summary="List acts", responses=told(400))
def list_audit(behind: Behind, query: Annotated[AuditQuery, Query()]) -> Page[AuditValue]:
    """Who changed what of teams, keys and prices; newest first."""
    table = tables.audit.c
    wanted = sa.select(table.id, table.at, table.actor, table.act, table.subject, table.detail)
    if query.after is not None:
        wanted = wanted.where(table.id < query.after)
    with behind.database.read() as connection:
        found = connection.execute(wanted.order_by(table.id.desc()).limit(query.limit + 1))
        rows = found.mappings().all()
    return first_of(rows, lambda row: str(row["id"]), lambda row: AuditValue(**row), query.limit)


# --- usage -----------------------------------------------------------------------------------


@usage.get("/admin/usage", summary="Usage of all teams", responses=told(400, 404))
def all_usage(
    accounts: Acting, behind: Behind, query: Annotated[UsageQuery, Query()]
) -> Page[UsageValue]:
    """What requests used, added up by team, and by day, model or key."""
    if query.team is not None:
        accounts.team(query.team)
    models = None if query.model is None else {query.model}
    return _usage(behind, query, query.team, models)


@usage.get("/v1/usage", summary="Usage of your team", responses=told(400, 404))
def own_usage(
    behind: Behind, caller: Asking, query: Annotated[OwnUsageQuery, Query()]
) -> Page[UsageValue]:
    """What your team's requests to the models of your key used, by day, model or key."""
    if query.model is None:
        return _usage(behind, query, caller.team, caller.models)
    require_model(caller, query.model)
    part = _usage(behind, query, caller.team, {query.model})
    served = sorted(filter(caller.may_use, behind.served()))
    if not part.data and query.model not in served:
        raise UnknownModelError(
            f"model: {query.model!r} is not served here and has no usage; served: "
            f"{', '.join(served) or 'none'}"
        )
    return part


def _usage(
    behind: Services, query: OwnUsageQuery, team: str | None, models: Collection[str] | None
) -> Page[UsageValue]:
    assert behind.report is not None
    sums = behind.report(
        team=team,
        by=query.by,
        since=query.since.timestamp() if query.since else None,
        until=query.until.timestamp() if query.until else None,
        models=models,
    )
    return page(sums, lambda each: f"{each.team}/{each.group}", lambda each: each, query)
