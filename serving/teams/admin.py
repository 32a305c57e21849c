"""The API for administrators under /admin, and each team's own usage at /v1/usage.

Owns the operations and their OpenAPI document. The gateway lets only a key with the `admin`
scope reach /admin, bounds bodies, and puts the `Caller` into `scope["state"]["caller"]`, in whose
name changes are made. Leaves what is taken and given to `admin_values`, errors to `admin_errors`
and all decisions to `accounts`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, Body, Depends, FastAPI, Path, Query, Request, Response, Security
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPBearer

from serving import __version__
from serving.teams import tables
from serving.teams.accounts import Accounts, ModelId, TeamChange
from serving.teams.admin_errors import OPENAPI_PATH, UnknownModelError, shape_errors, told
from serving.teams.admin_values import (
    AuditQuery,
    AuditValue,
    KeyRequest,
    KeysQuery,
    KeyValue,
    NewKeyValue,
    NewPrice,
    NewTeam,
    OwnUsageQuery,
    Page,
    PageQuery,
    PriceValue,
    Rotation,
    TeamPatch,
    TeamValue,
    UsageList,
    UsageQuery,
    first_of,
    key_value,
    new_key_value,
    page,
)
from serving.teams.audit import AuditEntry
from serving.teams.authenticate import require_model
from serving.teams.caller import Caller
from serving.teams.database import Database


@dataclass(frozen=True, slots=True)
class _Behind:
    """What the operations work with."""

    accounts: Callable[[str], Accounts]
    database: Database
    served: Callable[[], Collection[str]]
    now: Callable[[], float]


async def _behind(request: Request) -> _Behind:
    behind: _Behind = request.app.state.behind
    return behind


async def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


async def _private(response: Response) -> None:
    response.headers["cache-control"] = "no-store"


Behind = Annotated[_Behind, Depends(_behind)]
Asking = Annotated[Caller, Depends(_caller)]
TeamName = Annotated[str, Path(description="name of the team")]
KeyId = Annotated[str, Path(description="the 8 characters after `msk_`")]

# The two say how a key is sent; the gateway has looked at it.
_ALL = (
    Depends(_private),
    Security(HTTPBearer(auto_error=False)),
    Security(APIKeyHeader(name="x-api-key", auto_error=False)),
)
_admin = APIRouter(prefix="/admin", dependencies=_ALL)
_own = APIRouter(dependencies=_ALL)


def admin_app(
    accounts: Callable[[str], Accounts],
    database: Database,
    served: Callable[[], Collection[str]],
    now: Callable[[], float] = time.time,
) -> FastAPI:
    """The ASGI app of /admin and /v1/usage, whose paths it takes as they are.

    `accounts` gives those that act in the name of a key's id; `served` the ids of the models
    served now; `now` is Unix time.
    """
    app = FastAPI(
        title="moe-serving: teams, keys and usage",
        version=__version__,
        openapi_url=OPENAPI_PATH,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=_operation_id,
    )
    app.state.behind = _Behind(accounts, database, served, now)
    app.include_router(_admin)
    app.include_router(_own)
    shape_errors(app)
    return app


def _operation_id(route: APIRoute) -> str:
    return route.name


def _acting(behind: Behind, caller: Asking) -> Accounts:
    return behind.accounts(caller.key_id)


Acting = Annotated[Accounts, Depends(_acting)]


# --- teams -----------------------------------------------------------------------------------


@_admin.get("/teams", tags=["teams"], summary="List teams, by name", responses=told(400, 404))
def list_teams(accounts: Acting, query: Annotated[PageQuery, Query()]) -> Page[TeamValue]:
    part = [TeamValue.of(team) for team in accounts.list_teams()]
    return page(part, lambda team: team.name, query)


@_admin.post(
    "/teams", tags=["teams"], status_code=201, summary="Make a team", responses=told(400, 409)
)
def create_team(accounts: Acting, team: NewTeam) -> TeamValue:
    return TeamValue.of(accounts.create_team(team.name, team.priority, team.limits.limits()))


@_admin.get("/teams/{team}", tags=["teams"], summary="Get a team", responses=told(404))
def get_team(accounts: Acting, team: TeamName) -> TeamValue:
    return TeamValue.of(accounts.team(team))


@_admin.patch(
    "/teams/{team}",
    tags=["teams"],
    summary="Change a team's limits and priority, and leave what is not given",
    responses=told(400, 404),
)
def change_team(accounts: Acting, team: TeamName, change: TeamPatch) -> TeamValue:
    given = TeamChange.model_validate(change.model_dump(exclude_unset=True))
    return TeamValue.of(accounts.change_team(team, given))


# --- keys ------------------------------------------------------------------------------------


@_admin.get(
    "/keys",
    tags=["keys"],
    summary="List keys by team and age, revoked and expired ones included",
    responses=told(400, 404),
)
def list_keys(
    accounts: Acting, behind: Behind, query: Annotated[KeysQuery, Query()]
) -> Page[KeyValue]:
    part = [key_value(key, behind.now()) for key in accounts.list_keys(query.team)]
    return page(part, lambda key: key.id, query)


@_admin.post(
    "/keys",
    tags=["keys"],
    status_code=201,
    summary="Make a key; the reply holds it this once",
    responses=told(400, 404),
)
def create_key(accounts: Acting, behind: Behind, key: KeyRequest) -> NewKeyValue:
    new = accounts.create_key(key.team, key.name, key.grant())
    return new_key_value(new, behind.now())


@_admin.post(
    "/keys/{key}/revoke",
    tags=["keys"],
    summary="End a key; gateways refuse it within seconds",
    responses=told(404),
)
def revoke_key(accounts: Acting, behind: Behind, key: KeyId) -> KeyValue:
    return key_value(accounts.revoke_key(key), behind.now())


@_admin.post(
    "/keys/{key}/rotate",
    tags=["keys"],
    status_code=201,
    summary="Make a key that may what this one may, which stays valid for a while",
    responses=told(400, 404, 409),
)
def rotate_key(
    accounts: Acting, behind: Behind, key: KeyId, rotation: Annotated[Rotation, Body()] = Rotation()
) -> NewKeyValue:
    return new_key_value(accounts.rotate_key(key, rotation.overlap_s), behind.now())


# --- prices, usage, audit --------------------------------------------------------------------


@_admin.get("/prices", tags=["prices"], summary="List prices, by model", responses=told(400, 404))
def list_prices(accounts: Acting, query: Annotated[PageQuery, Query()]) -> Page[PriceValue]:
    prices = accounts.list_prices().items()
    part = [PriceValue(model=model, **price.model_dump()) for model, price in prices]
    return page(part, lambda price: price.model, query)


@_admin.put(
    "/prices/{model:path}",
    tags=["prices"],
    summary="Set what a model's tokens cost from now on",
    responses=told(400),
)
def set_price(
    accounts: Acting, model: Annotated[ModelId, Path(description="a model's id")], price: NewPrice
) -> PriceValue:
    accounts.set_price(model, price.price())
    return PriceValue(model=model, **price.price().model_dump())


@_admin.get("/audit", tags=["audit"], summary="List acts, newest first", responses=told(400))
def list_audit(behind: Behind, query: Annotated[AuditQuery, Query()]) -> Page[AuditValue]:
    columns = tables.audit.c
    wanted = sa.select(
        columns.id, columns.at, columns.actor, columns.act, columns.subject, columns.detail
    )
    if query.after is not None:
        wanted = wanted.where(columns.id < query.after)
    with behind.database.read() as connection:
        rows = connection.execute(wanted.order_by(columns.id.desc()).limit(query.limit + 1)).all()
    acts = [AuditValue.of(number, AuditEntry(*rest)) for number, *rest in rows]
    return first_of(acts, lambda act: str(act.id), query.limit)
