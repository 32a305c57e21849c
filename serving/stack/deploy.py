"""A validated stack as Ray Serve applications: engines and gateway, started and changed.

Owns the order. Runs in the `driver` process, which has connected to the stack's own
Ray. Leaves what an application consists of to `applications`, what an update does to
`update`, and reading Serve's state to `watch`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import ray
from ray import serve
from ray.serve.config import HTTPOptions

import serving

# Loaded here, while Ray still starts: the builders would load it when everybody waits.
import serving.engines.vllm
from serving.stack import update
from serving.stack.applications import Part, engine_part, gateway_part
from serving.stack.engine_plan import EnginePlan, plan_engines
from serving.stack.events import DRAINING, ENDED, UNFIT, Outcome, Step
from serving.stack.gateway_plan import GATEWAY_APP, GatewayPlan, plan_gateway
from serving.stack.spec import GatewaySpec, StackSpec
from serving.stack.watch import (
    DeployError,
    applications,
    engine_applications,
    replicas_of,
    unfit,
    wait_until_gone,
    wait_until_running,
)

Emit = Callable[[Step], None]
# Beyond the longest request: Serve's own loops take their turns.
DRAIN_MARGIN_S = 30.0


def start(stack: StackSpec, emit: Emit) -> Outcome:
    """Bring up every engine and the gateway, all at the same time.

    Raises DeployError with the first component's own message that fails, or where
    the machine does not have what the stack needs.
    """
    plans = plan_engines(stack)
    _check_room(plans, stack.gateway)
    serve.start(
        proxy_location="HeadOnly",
        http_options=HTTPOptions(host=stack.gateway.host, port=stack.gateway.port),
    )
    _run([*map(_engine_target, plans), _gateway_target(plan_gateway(stack, plans))])
    wait_until_running(_labels(plans) | {GATEWAY_APP: GATEWAY_APP}, emit)
    for label, reason in _unfit_ones(plans).items():
        emit(Step(name=label, step=UNFIT, detail=reason))
    return Outcome(text="ready")


def change(old: StackSpec, new: StackSpec, emit: Emit) -> Outcome:
    """Turn the running stack `old` into `new` without losing a request.

    New engines load beside the old; the gateway's table is switched when they are
    ready; then the old drain and end. Where a new engine does not start or fails a probe,
    everything is as before. Raises UpdateRefused before, and DeployError after, anything
    was touched.
    """
    update.refuse_fixed_fields(old, new)
    before, after = plan_engines(old), plan_engines(new)
    plan = update.plan_update(before, after, engine_applications())
    gateway = update.gateway_changes(old, before, new, after)
    if not plan.touches_engines and not gateway:
        return Outcome(text="nothing to change", changed=False)
    extra = update.grown(before, plan.change)
    needed = {kind: n + extra[kind] for kind, n in update.resources_for(plan.start).items()}
    _check_room_beside(needed, new.gateway)
    try:
        _start_and_switch(plan, plan_gateway(new, after), emit)
    except BaseException as error:
        _undo(plan, before, plan_gateway(old, before))
        if isinstance(error, DeployError):
            text = f"{error}\nThe stack that ran before goes on serving."
            raise DeployError(text, error.workers) from error
        raise
    _remove(plan.remove, before, emit)
    return Outcome(text=_summary(plan))


def _start_and_switch(plan: update.UpdatePlan, gateway: GatewayPlan, emit: Emit) -> None:
    moving = [*plan.start, *plan.change]
    if moving:
        _run([_engine_target(engine) for engine in moving])
        wait_until_running(_labels(moving), emit)
    for label, reason in _unfit_ones(plan.start).items():
        raise DeployError(f"{label} is not fit to serve: {reason}")
    _run([_gateway_target(gateway)])
    wait_until_running({GATEWAY_APP: GATEWAY_APP}, emit)


def _unfit_ones(plans: Sequence[EnginePlan]) -> dict[str, str]:
    """The engines that failed a probe, by label, and why; one that is idle is not asked."""
    awake = {name for name, known in applications().items() if replicas_of(known)[0]}
    reasons = {label: unfit(name) for name, label in _labels(plans).items() if name in awake}
    return {label: reason for label, reason in reasons.items() if reason}


def _undo(plan: update.UpdatePlan, before: Sequence[EnginePlan], gateway: GatewayPlan) -> None:
    """As it was: the table before the deletion, so that no request is sent to what goes."""
    changed = {engine.app_name for engine in plan.change}
    # Before the gateway, which makes its handles by what Serve has of the engines then.
    _run([_engine_target(engine) for engine in before if engine.app_name in changed])
    _run([_gateway_target(gateway)])
    for engine in plan.start:
        serve.delete(engine.app_name, _blocking=False)


def _remove(names: Sequence[str], before: Sequence[EnginePlan], emit: Emit) -> None:
    """Let the old engines finish their requests, then end them."""
    known = {engine.app_name: engine for engine in before}
    longest = max((e.drain_within_s for e in known.values()), default=0.0)
    for name in names:
        emit(Step(name=_old_label(name, known), step=DRAINING, detail="finishes its requests"))
        serve.delete(name, _blocking=False)
    left = list(names)
    deadline = time.monotonic() + longest + DRAIN_MARGIN_S
    while left and time.monotonic() < deadline:
        still = wait_until_gone(left, time.monotonic() + 1)
        for name in set(left) - set(still):
            emit(Step(name=_old_label(name, known), step=ENDED))
        left = still


def _old_label(name: str, known: Mapping[str, EnginePlan]) -> str:
    engine = known.get(name)
    return f"{engine.model_id}@{engine.variant} (old)" if engine else name


def _summary(plan: update.UpdatePlan) -> str:
    counts = (
        (len(plan.start), "started"),
        (len(plan.change), "changed in place"),
        (len(plan.keep), "untouched"),
        (len(plan.remove), "ended"),
    )
    return "engines: " + ", ".join(f"{n} {what}" for n, what in counts if n)


def _labels(plans: Sequence[EnginePlan]) -> dict[str, str]:
    return {plan.app_name: f"{plan.model_id}@{plan.variant}" for plan in plans}


# --- room ---------------------------------------------------------------------------------


def _check_room(plans: Sequence[EnginePlan], gateway: GatewaySpec) -> None:
    need, total = update.resources_for(plans), ray.cluster_resources()
    need["CPU"] += gateway.num_cpus * gateway.replicas
    if missing := update.shortage(need, total, total):
        raise DeployError(
            f"not enough room: the stack {missing}; choose a smaller stack, fewer replicas, "
            "or a lower num_cpus (what Ray sets aside, not a limit)"
        )
    if problem := update.too_few_nodes(gateway, _nodes()):
        raise DeployError(problem)


def _nodes() -> int:
    return sum(bool(node["Alive"]) for node in ray.nodes())


def _check_room_beside(need: Mapping[str, float], gateway: GatewaySpec) -> None:
    if problem := update.too_few_nodes(gateway, _nodes()):
        raise update.UpdateRefused(f"{problem}. Nothing was changed")
    if missing := update.shortage(need, ray.available_resources(), ray.cluster_resources()):
        raise update.UpdateRefused(
            f"not enough room: the new engines start beside the old ones and {missing}; "
            "`moe-serving down`, then `moe-serving up` with the new file. Nothing was changed"
        )


# --- Serve applications -------------------------------------------------------------------


def _run(targets: Sequence[serve.RunTarget]) -> None:
    """Hand applications to Serve and return at once; `watch` says how they fare."""
    if targets:
        serve.run_many(
            targets,
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )


def _engine_target(plan: EnginePlan) -> serve.RunTarget:
    return _target(engine_part(plan), version=plan.app_name)


def _gateway_target(plan: GatewayPlan) -> serve.RunTarget:
    return _target(gateway_part(plan), version=serving.__version__)


def _target(part: Part, version: str) -> serve.RunTarget:
    """The application with its options over it, under a version of ours.

    Without one Serve gives every deploy a random version and replaces the
    replicas, even where only `user_config` or the number of replicas has changed.
    Serve 2.60 has no public way to name it.
    """
    application = part.builder(part.args)
    deployment = application._bound_deployment.options(**part.options)
    deployment._version = version
    application._bound_deployment = deployment
    return serve.RunTarget(target=application, name=part.name, route_prefix=part.route_prefix)
