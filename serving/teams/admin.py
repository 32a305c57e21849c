"""The API for administrators under /admin, and each team's own usage at /v1/usage.

Owns the app around the operations and their OpenAPI document, which loads nothing from elsewhere.
The gateway has looked at the key, lets only one with the `admin` scope reach /admin, bounds
bodies, and puts the `Caller` into `scope["state"]["caller"]`; changes are made in its name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from fastapi import Depends, FastAPI, Response, Security
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPBearer

from serving import __version__
from serving.teams import admin_operations
from serving.teams.accounts import Accounts
from serving.teams.admin_errors import OPENAPI_PATH, shape_errors
from serving.teams.admin_operations import Report, Services
from serving.teams.database import Database


async def _private(response: Response) -> None:
    response.headers["cache-control"] = "no-store"


# The last two only say how a key is sent.
_DEPENDENCIES = (
    Depends(_private),
    Security(HTTPBearer(auto_error=False)),
    Security(APIKeyHeader(name="x-api-key", auto_error=False)),
)


def admin_app(
    accounts: Callable[[str], Accounts],
    database: Database,
    served: Callable[[], Collection[str]],
    report: Report | None = None,
    now: Callable[[], float] = time.time,
) -> FastAPI:
    """The ASGI app of /admin and /v1/usage, which takes paths as they are; see `Services`.

    Without a `report`, there is nothing of usage. It answers every error; one that is a fault of
    its own it raises after that, for the log.
    """
    app = FastAPI(
        title="moe-serving: teams, keys and usage",
        version=__version__,
        openapi_url=OPENAPI_PATH,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        dependencies=_DEPENDENCIES,
        generate_unique_id_function=_operation_id,
    )
    app.state.services = Services(accounts, database, served, report, now)
    app.include_router(admin_operations.admin)
    if report is not None:
        app.include_router(admin_operations.usage)
    shape_errors(app)
    return app


def _operation_id(route: APIRoute) -> str:
    return route.name
