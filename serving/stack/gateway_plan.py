"""From a validated stack to what the gateway is started with.

Owns the gateway's settings and its routing table, and which of its fields can
change on a running stack. Pure values: Ray is not imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serving.gateway.settings import GatewaySettings
from serving.router.table import ModelRoute, RoutingTable, VariantRoute
from serving.stack.engine_plan import EnginePlan
from serving.stack.spec import StackSpec

GATEWAY_APP = "gateway"
# HAProxy's listener and Ray's reservation are taken once, when the gateway's processes start.
FIXED_FIELDS = ("host", "port", "tls", "num_cpus")


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """The gateway, with everything decided."""

    settings: GatewaySettings
    replicas: int
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
        request_timeout_s=gateway.request_timeout_s,
        connect_timeout_s=gateway.connect_timeout_s,
        queue_timeout_s=gateway.queue_timeout_s,
        keep_alive_s=gateway.keep_alive_s,
        cors_origins=gateway.cors_origins,
    )
    return GatewayPlan(
        settings=settings,
        replicas=gateway.replicas,
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
                )
                for plan in engines
                if plan.model_id == model.id
            ),
        )
        for model in stack.models
    )
    return RoutingTable(models=models)
