"""What runs, as Serve's controller sees it, beside what the stack file asks for.

Owns the join of plans and applications. Runs in the `driver` process.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from ray.serve.schema import ApplicationDetails

from serving.stack.engine_plan import EnginePlan, plan_engines
from serving.stack.events import READY, UNFIT, EngineStatus, Status
from serving.stack.spec import StackSpec
from serving.stack.update import fewest_replicas
from serving.stack.watch import (
    applications,
    message_of,
    replicas_of,
    starting_for_s,
    step_of,
    unfit,
    unplaced,
)


def read(stack: StackSpec) -> Status:
    """The state of every engine of the stack and of every application."""
    known, pending = applications(), unplaced()
    return Status(
        stack=stack.name,
        engines=tuple(
            _engine(plan, known.get(plan.app_name), pending) for plan in plan_engines(stack)
        ),
        applications={name: str(app.status.value) for name, app in sorted(known.items())},
    )


def _engine(
    plan: EnginePlan, application: ApplicationDetails | None, pending: Collection[str]
) -> EngineStatus:
    step, _ = step_of(application, waits=any(plan.app_name in name for name in pending))
    running, wanted = replicas_of(application) if application else (0, fewest_replicas(plan))
    well = application is not None and application.status.value == "RUNNING"
    # An idle engine is not asked: the question would wake it.
    reason = unfit(plan.app_name) if step == READY else ""
    return EngineStatus(
        model=plan.model_id,
        variant=plan.variant,
        default=plan.is_default,
        app=plan.app_name,
        state=UNFIT if reason else step if application else "missing",
        running_replicas=running,
        wanted_replicas=wanted,
        starting_for_s=starting_for_s(application, time.time()) if application else None,
        max_model_len=plan.max_model_len,
        speculative=plan.speculative,
        message=reason if well or application is None else message_of(application),
    )
