"""What an update does: which engines start, change, stay and go.

Owns the comparison of a running stack with a new one and the reasons to refuse,
as pure functions over plans. Leaves doing it to `deploy`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from serving.stack.engine_plan import EnginePlan
from serving.stack.gateway_plan import FIXED_FIELDS, plan_gateway
from serving.stack.spec import GatewaySpec, StackSpec

# Serve's tree of prompts is an actor, which Ray places only where a core is free, and then
# takes none. Until it is placed, the gateway would wait for it with all its requests.
PREFIX_TREE_CPUS = 1.0


class UpdateRefused(ValueError):
    """This update cannot be made on a running stack; the text names the field and the cure."""


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """Every engine once, by what happens to it; `remove` holds names of applications."""

    start: tuple[EnginePlan, ...]
    change: tuple[EnginePlan, ...]
    keep: tuple[EnginePlan, ...]
    remove: tuple[str, ...]

    @property
    def touches_engines(self) -> bool:
        """Whether any engine starts, changes or goes."""
        return bool(self.start or self.change or self.remove)


def plan_update(
    old: Sequence[EnginePlan], new: Sequence[EnginePlan], running: Collection[str]
) -> UpdatePlan:
    """Compare by application name, which carries a hash of all that needs a new process.

    `running` are the engine applications that Serve has; it decides over `old`,
    so that an engine that was lost is started and one that nobody remembers goes.
    """
    before = {plan.app_name: plan for plan in old}
    start, change, keep = [], [], []
    for plan in new:
        if plan.app_name not in running:
            start.append(plan)
        elif plan.app_name in before and _scaling(before[plan.app_name]) == _scaling(plan):
            keep.append(plan)
        else:
            change.append(plan)
    wanted = {plan.app_name for plan in new}
    remove = tuple(sorted(name for name in running if name not in wanted))
    return UpdatePlan(tuple(start), tuple(change), tuple(keep), remove)


def _scaling(plan: EnginePlan) -> tuple[object, ...]:
    """What Ray Serve changes on a running engine."""
    return (
        plan.replicas,
        plan.autoscaling,
        plan.max_ongoing_requests,
        plan.drain_within_s,
        plan.balancing,
    )


def refuse_fixed_fields(old: StackSpec, new: StackSpec) -> None:
    """Raise UpdateRefused where a field differs that a running stack cannot change."""
    for name in FIXED_FIELDS:
        before, after = getattr(old.gateway, name), getattr(new.gateway, name)
        if before != after:
            raise UpdateRefused(
                f"gateway.{name}: found {_shown(after)}, but the running stack has "
                f"{_shown(before)}, and this cannot change while it runs; "
                "`moe-serving down`, then `moe-serving up` again"
            )


def too_few_nodes(gateway: GatewaySpec, nodes: int) -> str | None:
    """Why the gateway's processes cannot be spread over `nodes` Ray nodes, and the cure."""
    most = gateway.max_replicas_per_node
    if most is None or gateway.replicas <= most * nodes:
        return None
    return (
        f"gateway.replicas: found {gateway.replicas}, but with max_replicas_per_node {most} "
        f"Ray's {nodes} node{'' if nodes == 1 else 's'} can have {most * nodes}; lower it, "
        "or start Ray on more nodes first"
    )


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


def gateway_changes(
    old: StackSpec, old_engines: Sequence[EnginePlan], new: StackSpec, engines: Sequence[EnginePlan]
) -> bool:
    """Whether the gateway's settings or its routing table differ."""
    return plan_gateway(old, old_engines) != plan_gateway(new, engines)


def resources_for(plans: Iterable[EnginePlan]) -> dict[str, float]:
    """GPUs and cores, as Ray counts them, that these engines take at their fewest replicas."""
    plans = tuple(plans)
    need = {"GPU": 0.0, "CPU": 0.0}
    if any(plan.balancing == "prefix-aware" for plan in plans):
        need["CPU"] += PREFIX_TREE_CPUS
    for plan in plans:
        replicas = fewest_replicas(plan)
        need["GPU"] += plan.gpus * replicas
        need["CPU"] += plan.num_cpus * replicas
    return need


def fewest_replicas(plan: EnginePlan) -> int:
    """Replicas that run when the stack starts, and idle ones stay."""
    scaling = plan.autoscaling
    if scaling is None:
        return plan.replicas or 1
    return max(scaling.min_replicas, scaling.initial_replicas or 0)


def grown(old: Sequence[EnginePlan], change: Sequence[EnginePlan]) -> dict[str, float]:
    """What the changed engines take beyond what they have; never below 0."""
    before = {plan.app_name: plan for plan in old}
    had = resources_for(before[plan.app_name] for plan in change if plan.app_name in before)
    need = resources_for(change)
    return {kind: max(0.0, need[kind] - had[kind]) for kind in need}


def shortage(
    need: Mapping[str, float], free: Mapping[str, float], total: Mapping[str, float]
) -> str | None:
    """What is missing, as `needs 2 GPUs, 1 of 2 is free`; None where it fits."""
    for kind in ("GPU", "CPU"):
        wanted, left = need.get(kind, 0.0), free.get(kind, 0.0)
        if wanted > left + 1e-6:
            have = f"{left:g} of {total.get(kind, 0.0):g} free" if total.get(kind) else "none here"
            return f"needs {wanted:g} {kind}{'' if wanted == 1 else 's'}, {have}"
    return None
