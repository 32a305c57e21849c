"""From a validated stack to what the gateway is started with.

Owns the gateway's settings and its routing table, and which of its fields can
change on a running stack. Pure values: Ray is not imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serving import catalog
from serving.gateway.settings import GatewaySettings
from serving.router.table import ModelRoute, RoutingTable, VariantRoute
from serving.stack import runtime
from serving.stack.engine_plan import EnginePlan
from serving.stack.spec import ModelSpec, StackSpec

GATEWAY_APP = "gateway"
# HAProxy's listener and Ray's reservation are taken once, when the gateway's processes start.
FIXED_FIELDS = ("host", "port", "tls", "num_cpus", "max_replicas_per_node")
# Of a request's time, for an engine that wakes; the rest is for the answer.
WAKE_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """The gateway, with everything decided."""

    settings: GatewaySettings
    replicas: int
    max_replicas_per_node: int | None
    max_ongoing_requests: int
    num_cpus: float
    """Cores that Ray sets aside per replica."""
    drain_within_s: float
    """Longest wait for running requests before a replica ends, seconds."""


def plan_gateway(stack: StackSpec, engines: Sequence[EnginePlan]) -> GatewayPlan:
    """The gateway of this stack before these engines."""
    gateway = stack.gateway
    settings = GatewaySettings(
        table=routing_table(stack, engines),
        max_body_bytes=gateway.max_body_mib * 2**20,
        max_ongoing_requests=gateway.max_ongoing_requests,
        request_timeout_s=gateway.request_timeout_s,
        connect_timeout_s=gateway.connect_timeout_s,
        queue_timeout_s=gateway.queue_timeout_s,
        # Before the request's own end, which tells no time to come back after.
        wake_timeout_s=min(gateway.wake_timeout_s, WAKE_SHARE * gateway.request_timeout_s),
        first_byte_timeout_s=gateway.first_byte_timeout_s,
        between_bytes_timeout_s=gateway.between_bytes_timeout_s,
        keep_alive_s=gateway.keep_alive_s,
        limits=gateway.limits,
        cors_origins=gateway.cors_origins,
        gateways=gateway.replicas,
        keys=gateway.access == "keys",
        home=runtime.home(),
    )
    return GatewayPlan(
        settings=settings,
        replicas=gateway.replicas,
        max_replicas_per_node=gateway.max_replicas_per_node,
        max_ongoing_requests=gateway.max_ongoing_requests,
        num_cpus=gateway.num_cpus,
        drain_within_s=gateway.request_timeout_s,
    )


def routing_table(stack: StackSpec, engines: Sequence[EnginePlan]) -> RoutingTable:
    """Every model of the stack with its variants' applications."""
    models = tuple(
        ModelRoute(
            id=model.id,
            aliases=model.aliases,
            default_variant=model.default_variant,
            variants=tuple(
                VariantRoute(
                    variant=plan.variant,
                    app_name=plan.app_name,
                    max_model_len=plan.max_model_len,
                    speculative=plan.speculative,
                    max_num_seqs=plan.max_num_seqs,
                    slots=plan.max_ongoing_requests,
                    max_queued=plan.max_queued_requests,
                    may_grow_to=plan.autoscaling.max_replicas if plan.autoscaling else 0,
                    keeps_responses=plan.keeps_responses,
                )
                for plan in engines
                if plan.model_id == model.id
            ),
            limits=model.limits,
            routing=model.routing.resolve(experts=_has_experts(model)),
            gpu=model.gpu,
        )
        for model in stack.models
    )
    return RoutingTable(models=models)


def _has_experts(model: ModelSpec) -> bool | None:
    """Whether the model is a mixture of experts; None where the catalogue does not have it."""
    if model.model is None:
        return None
    return catalog.find_model(model.model).architecture.experts is not None
