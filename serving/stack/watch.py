"""Serve's view of a stack's applications, in the words a user sees.

Owns reading the controller and turning its states into steps and faults. Runs in
the `driver` process.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import (
    ApplicationDetails,
    DeploymentDetails,
    ReplicaDetails,
    ServeInstanceDetails,
)
from ray.util import placement_group_table

from serving.stack.engine_plan import ENGINE_PREFIX
from serving.stack.events import FAILED, IDLE, LOADING, READY, STARTING, WAITING, Step

POLL_EVERY_S = 1.0
UNFIT_WITHIN_S = 5.0
MESSAGE_LINES = 8
MESSAGE_CHARACTERS = 1200
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# The last line of a traceback: the exception's name, then what it says.
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Failure)\b)")


class DeployError(RuntimeError):
    """An application did not come up; `workers` are Ray's ids of the processes it died in."""

    def __init__(self, message: str, workers: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.workers = tuple(workers)


def applications() -> dict[str, ApplicationDetails]:
    """Every application that Serve has, by name; {} where Serve does not run."""
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return {}
    details = ServeInstanceDetails(**client.get_serve_details())
    return dict(details.applications)


def engine_applications() -> frozenset[str]:
    """Names of the engine applications that are not being deleted."""
    return frozenset(
        name
        for name, application in applications().items()
        if name.startswith(ENGINE_PREFIX) and application.status.value != "DELETING"
    )


def wait_until_running(labels: Mapping[str, str], emit: Callable[[Step], None]) -> None:
    """Return when every application runs or is idle; `labels` gives the name to show for each.

    Emits each change of a step. Raises DeployError on the first that fails.
    """
    shown: dict[str, tuple[str, str]] = {}
    while True:
        known, pending = applications(), unplaced()
        for name, label in labels.items():
            step, detail = step_of(known.get(name), waits=any(name in p for p in pending))
            if shown.get(name) != (step, detail):
                shown[name] = (step, detail)
                emit(Step(name=label, step=step, detail=detail))
            if step == FAILED:
                text = f"{label} did not start: {message_of(known[name])}"
                raise DeployError(text, dead_workers(known[name]))
        if all(step in (READY, IDLE) for step, _ in shown.values()):
            return
        time.sleep(POLL_EVERY_S)


def unfit(app_name: str) -> str:
    """Why a running engine should get no request, by its own word; empty where it should."""

    async def ask() -> str:
        # With Serve's throughput settings a handle belongs to the event loop it is made on.
        handle = serve.get_app_handle(app_name).options(method_name="unfit")
        async with asyncio.timeout(UNFIT_WITHIN_S):
            return str(await handle.remote())

    try:
        return asyncio.run(ask())
    except (TimeoutError, RayError, RayServeException):
        return ""


def wait_until_gone(names: Collection[str], deadline: float) -> list[str]:
    """The applications that are still there at `deadline`, on the monotonic clock."""
    left = sorted(names)
    while left and time.monotonic() < deadline:
        time.sleep(POLL_EVERY_S / 2)
        left = sorted(applications().keys() & set(names))
    return left


def step_of(application: ApplicationDetails | None, *, waits: bool) -> tuple[str, str]:
    """The step an application is in, and a detail; `waits` if Ray has no room for a replica yet."""
    if application is None:
        return STARTING, ""
    status = application.status.value
    running, wanted = replicas_of(application)
    # One that scales by itself is running for Serve while it has no replica, too.
    if status == "RUNNING" and (running or not wanted):
        return (READY if running else IDLE), ""
    if status == "DEPLOY_FAILED" or (status == "UNHEALTHY" and not _replaces(application)):
        return FAILED, ""
    detail = f"{running} of {wanted} replicas" if wanted > 1 else ""
    if waits:
        return WAITING, detail
    starting = _starting(application)
    if starting and all(replica.pid is not None for replica in starting):
        return LOADING, detail
    return STARTING, detail


def replicas_of(application: ApplicationDetails) -> tuple[int, int]:
    """How many replicas run, and how many Serve aims at."""
    deployments: list[DeploymentDetails] = list(application.deployments.values())
    running = sum(r.state.value == "RUNNING" for d in deployments for r in d.replicas)
    return running, sum(d.target_num_replicas for d in deployments)


def starting_for_s(application: ApplicationDetails, now: float) -> float | None:
    """Seconds up to `now`, in Unix time, since the first starting replica began; None: none is."""
    began = [replica.start_time_s for replica in _starting(application)]
    return max(now - min(began), 0.0) if began else None


def _replaces(application: ApplicationDetails) -> bool:
    """Whether it is unhealthy because a replica that had run is being replaced."""
    unhealthy = [d for d in application.deployments.values() if d.status.value == "UNHEALTHY"]
    return all(d.status_trigger.value == "HEALTH_CHECK_FAILED" for d in unhealthy)


def _starting(application: ApplicationDetails) -> list[ReplicaDetails]:
    replicas = [r for d in application.deployments.values() for r in d.replicas]
    return [r for r in replicas if r.state.value not in ("RUNNING", "STOPPING")]


def message_of(application: ApplicationDetails) -> str:
    """What Serve says about a failed application, cut to the error itself."""
    texts = [d.message for d in application.deployments.values()] + [application.message]
    return shorten(max(texts, key=len))


def shorten(text: str) -> str:
    """The last exception of a traceback with what follows it; other text as it is, cut."""
    lines = [line.rstrip() for line in _ANSI.sub("", text).splitlines() if line.strip()]
    lines = [line for line in lines if "For further information visit" not in line]
    starts = [i for i, line in enumerate(lines) if _EXCEPTION.match(line)]
    kept = lines[starts[-1] :] if starts else lines[-MESSAGE_LINES:]
    return "\n".join(kept[:MESSAGE_LINES])[:MESSAGE_CHARACTERS]


def dead_workers(application: ApplicationDetails) -> list[str]:
    """Ids of the worker processes that replicas of this application died in."""
    found: list[Any] = []
    for deployment in application.deployments.values():
        found += [*deployment.recent_dead_replicas, *deployment.replicas]
    return [replica.worker_id for replica in found if replica.worker_id]


def unplaced() -> list[str]:
    """Names of the replicas for which Ray has not found room."""
    table = placement_group_table().values()
    return [row["name"] for row in table if row["state"] == "PENDING"]
