"""A validated stack on Ray Serve: engine applications first, then the gateway.

Owns the deployment options and the order. Leaves the Ray cluster's own start
and stop to `runtime`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.llm import LLMConfig, build_llm_deployment

from serving.engines.vllm import HEALTH_CHECK_PERIOD_S, VllmEngine
from serving.gateway.deployment import build_gateway
from serving.gateway.settings import GatewaySettings
from serving.router.table import ModelRoute, RoutingTable, VariantRoute
from serving.stack.engine_plan import EnginePlan, plan_engines
from serving.stack.spec import StackSpec

GATEWAY_APP = "gateway"


class DeployError(RuntimeError):
    """An engine or the gateway did not come up."""


def deploy(stack: StackSpec, report: Callable[[str], None]) -> None:
    """Bring up every engine, then the gateway; `report` gets a line per step.

    Needs a connection to the stack's own Ray. Raises DeployError with Serve's
    message for the application that failed.
    """
    plans = plan_engines(stack)
    host = stack.gateway.host
    serve.start(
        proxy_location="HeadOnly", http_options=HTTPOptions(host=host, port=stack.gateway.port)
    )
    for plan in plans:
        serve.run(engine_application(plan), name=plan.app_name, route_prefix=None, blocking=False)
    for plan in plans:
        _wait_until_running(plan.app_name, f"{plan.model_id}@{plan.variant}", report)
    serve.run(
        build_gateway(
            gateway_settings(stack, plans),
            num_replicas=stack.gateway.replicas,
            max_ongoing_requests=stack.gateway.max_ongoing_requests,
            ray_actor_options={"num_cpus": stack.gateway.num_cpus},
        ),
        name=GATEWAY_APP,
        route_prefix="/",
        blocking=False,
    )
    _wait_until_running(GATEWAY_APP, "gateway", report)


def engine_application(plan: EnginePlan) -> serve.Application:
    """The Serve application of one engine."""
    arguments = {**plan.vllm_args, **plan.frontend_args}
    arguments.pop("model")
    if plan.speculative is not None:
        # Each reply then says what was drafted and accepted; a plain engine refuses the first.
        arguments["per_request_spec_decode_metrics"] = "summary"
        arguments["enable_per_request_metrics"] = True
    on_cpu = plan.gpus == 0
    config = LLMConfig(
        model_loading_config={"model_id": plan.model_id, "model_source": plan.source},
        engine_kwargs=arguments,
        # Off, so that vLLM keeps its own Prometheus metrics under their own names.
        log_engine_metrics=False,
        accelerator_config={"kind": "cpu"} if on_cpu else None,
        placement_group_config={"bundles": [{"CPU": plan.num_cpus}]} if on_cpu else None,
        # The bundle above is all an engine takes; Ray would add a core of its own.
        deployment_config={"ray_actor_options": {"num_cpus": 0}},
        runtime_env={"env_vars": dict(plan.env)},
    )
    scaling: dict[str, object] = (
        {"autoscaling_config": plan.autoscaling.model_dump()}
        if plan.autoscaling
        else {"num_replicas": plan.replicas, "autoscaling_config": None}
    )
    return build_llm_deployment(
        config,
        deployment_cls=VllmEngine,
        override_serve_options={
            "ray_actor_options": {
                "num_cpus": 0,
                "runtime_env": {"env_vars": dict(plan.env)},
            },
            "max_ongoing_requests": plan.max_ongoing_requests,
            "max_queued_requests": 4 * plan.max_ongoing_requests,
            "health_check_period_s": HEALTH_CHECK_PERIOD_S,
            **scaling,
        },
    )


def gateway_settings(stack: StackSpec, plans: tuple[EnginePlan, ...]) -> GatewaySettings:
    """The gateway's settings and routing table for this stack."""
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
                for plan in plans
                if plan.model_id == model.id
            ),
        )
        for model in stack.models
    )
    gateway = stack.gateway
    return GatewaySettings(
        table=RoutingTable(models=models),
        max_body_bytes=gateway.max_body_mib * 2**20,
        request_timeout_s=gateway.request_timeout_s,
        connect_timeout_s=gateway.connect_timeout_s,
        keep_alive_s=gateway.keep_alive_s,
        cors_origins=gateway.cors_origins,
    )


def _wait_until_running(app_name: str, label: str, report: Callable[[str], None]) -> None:
    began = time.monotonic()
    reported = ""
    while True:
        application = serve.status().applications.get(app_name)
        status = application.status.value if application else "NOT_STARTED"
        seconds = time.monotonic() - began
        if status != reported:
            report(f"{label}: {status.lower()} after {seconds:.0f} s")
            reported = status
        if status == "RUNNING":
            return
        if status in ("DEPLOY_FAILED", "UNHEALTHY") and application is not None:
            raise DeployError(f"{label} did not start: {application.message}")
        time.sleep(0.5)
