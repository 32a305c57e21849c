"""Engines and gateway as Serve applications that can be named by import path.

Owns what a replica is made of (`args`) and what Serve changes while it runs
(`options`). `moe-serving up` and a Serve config both go from `engine_part` and
`gateway_part` to the builders `engine` and `gateway`, so that what starts is the
same. Leaves the order of things to `deploy` and `serve_config`. Ray and vLLM are
imported when an application is built: a config is written without either, and
the gateway's build does not load vLLM.
"""

# Without `from __future__ import annotations`: Serve turns a config's args into the class
# that a builder's parameter is annotated with, and must find the class there, not its name.

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

import serving
from serving.stack.engine_plan import EnginePlan
from serving.stack.gateway_plan import GATEWAY_APP, GatewayPlan

if TYPE_CHECKING:
    from ray import serve

ENGINE_DEPLOYMENT = "VllmEngine"
GATEWAY_DEPLOYMENT = "Gateway"
# Where Serve has to replace replicas, the new ones start before the old ones stop.
MAX_SURGE_PERCENT = 100


class EngineArgs(BaseModel):
    """What an engine's replicas are made of; other values are another engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_id: str
    source: str
    """Folder or Hugging Face repository."""
    vllm_args: dict[str, Any]
    """Arguments of vLLM's engine and API server, by vLLM's names."""
    env: dict[str, str]
    gpus: int
    """GPUs per replica; 0 on CPU."""
    num_cpus: float
    """Cores that Ray sets aside per replica."""


class GatewayArgs(BaseModel):
    """What the gateway's replicas are made of; other values replace them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str
    """Of moe-serving."""
    num_cpus: float
    """Cores that Ray sets aside per replica."""
    max_replicas_per_node: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One application of a stack, built or written into a config."""

    name: str
    route_prefix: str | None
    builder: Callable[[Any], "serve.Application"]
    """A function of this module, called with `args`."""
    args: EngineArgs | GatewayArgs
    deployment: str
    """Name of its only deployment."""
    options: Mapping[str, Any]
    """Options of the deployment that change without a new replica, by Serve's names; JSON."""

    @property
    def import_path(self) -> str:
        """Of the builder, as a Serve config has it."""
        return f"{self.builder.__module__}:{self.builder.__name__}"


def engine_part(plan: EnginePlan) -> Part:
    """The application of one engine."""
    arguments = {**plan.vllm_args, **plan.frontend_args}
    arguments.pop("model")
    if plan.speculative is not None:
        # Each reply then says what was drafted and accepted; a plain engine refuses the first.
        arguments["per_request_spec_decode_metrics"] = "summary"
        arguments["enable_per_request_metrics"] = True
    scaling: dict[str, Any] = (
        {"autoscaling_config": plan.autoscaling.model_dump()}
        if plan.autoscaling
        else {"num_replicas": plan.replicas, "autoscaling_config": None}
    )
    return Part(
        name=plan.app_name,
        route_prefix=None,
        builder=engine,
        args=EngineArgs(
            model_id=plan.model_id,
            source=plan.source,
            vllm_args=arguments,
            env=plan.env,
            gpus=plan.gpus,
            num_cpus=plan.num_cpus,
        ),
        deployment=ENGINE_DEPLOYMENT,
        options={
            "max_ongoing_requests": plan.max_ongoing_requests,
            "max_queued_requests": 4 * plan.max_ongoing_requests,
            # A replica that is taken away first finishes what it has.
            "graceful_shutdown_timeout_s": plan.drain_within_s,
            **scaling,
        },
    )


def gateway_part(plan: GatewayPlan) -> Part:
    """The application of the gateway, its routing table among the options."""
    return Part(
        name=GATEWAY_APP,
        route_prefix="/",
        builder=gateway,
        args=GatewayArgs(
            version=serving.__version__,
            num_cpus=plan.num_cpus,
            max_replicas_per_node=plan.max_replicas_per_node,
        ),
        deployment=GATEWAY_DEPLOYMENT,
        options={
            "num_replicas": plan.replicas,
            "max_ongoing_requests": plan.max_ongoing_requests,
            "graceful_shutdown_timeout_s": plan.drain_within_s,
            "user_config": plan.settings.model_dump(mode="json"),
        },
    )


def engine(args: EngineArgs) -> "serve.Application":
    """One vLLM engine; Serve's own defaults for what `options` are to say."""
    from ray.serve.llm import LLMConfig, build_llm_deployment

    from serving.engines.vllm import HEALTH_CHECK_PERIOD_S, VllmEngine

    config = LLMConfig(
        model_loading_config={"model_id": args.model_id, "model_source": args.source},
        engine_kwargs=dict(args.vllm_args),
        # Off, so that vLLM keeps its own Prometheus metrics under their own names.
        log_engine_metrics=False,
        accelerator_config=None if args.gpus else {"kind": "cpu"},
        placement_group_config={"bundles": _bundles(args)},
        # The bundles are all an engine takes; Ray would add a core of its own.
        deployment_config={"ray_actor_options": {"num_cpus": 0}},
        runtime_env={"env_vars": dict(args.env)},
    )
    return build_llm_deployment(
        config,
        deployment_cls=VllmEngine,
        override_serve_options={
            "name": ENGINE_DEPLOYMENT,
            "ray_actor_options": {"num_cpus": 0, "runtime_env": {"env_vars": dict(args.env)}},
            "health_check_period_s": HEALTH_CHECK_PERIOD_S,
            # What vLLM refuses once it refuses again, and each try takes minutes.
            "max_constructor_retry_count": 1,
            "max_surge_percent": MAX_SURGE_PERCENT,
        },
    )


def gateway(args: GatewayArgs) -> "serve.Application":
    """The gateway, which knows no model before `options` give it its table."""
    from serving.gateway.deployment import build_gateway
    from serving.gateway.settings import GatewaySettings

    return build_gateway(
        GatewaySettings(),
        ray_actor_options={"num_cpus": args.num_cpus},
        max_replicas_per_node=args.max_replicas_per_node,
        max_constructor_retry_count=1,
        # On nodes that may hold no more, a new one would wait for ever for an old one to stop.
        max_surge_percent=0 if args.max_replicas_per_node else MAX_SURGE_PERCENT,
    )


def _bundles(args: EngineArgs) -> list[dict[str, float]]:
    """What Ray sets aside for one replica: one bundle per GPU, the cores with the first."""
    if not args.gpus:
        return [{"CPU": args.num_cpus}]
    return [{"GPU": 1, "CPU": args.num_cpus}] + [{"GPU": 1}] * (args.gpus - 1)
