"""From a validated stack to what each engine is started with.

Owns the defaults that depend on hardware, the translation into vLLM's argument
names, and the application's name. Leaves starting to the engines. Pure values:
neither Ray nor vLLM is imported.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

from serving.engines.probe_settings import Probes
from serving.router.balancing import Balancing
from serving.stack.settings import AutoscalingSpec, EngineSettings, ProbesSpec, overlay
from serving.stack.spec import InlineModel, ModelSpec, StackSpec

CPU = "cpu"
ENGINE_PREFIX = "engine-"
# vLLM's own default (up to 1,024) exceeds the GDN state blocks of a single card.
MAX_NUM_SEQS = {True: 16, False: 64}
# GiB of KV cache, and threads left to the scheduler: a small machine runs other things too.
CPU_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# A host that is allowed could otherwise send the engine on to one that is not.
IMAGES_ENV = {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"}
RESPONSES_STORE = "VLLM_ENABLE_RESPONSES_API_STORE"
# vLLM takes an empty list for "every host"; this name can never resolve (RFC 6761).
NO_HOST = "none.invalid"

# Settings that vLLM takes under the same name.
_SAME_NAME = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "mamba_ssm_cache_dtype",
    "reasoning_parser",
)


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One engine: a variant of a model, with everything decided."""

    model_id: str
    variant: str
    app_name: str
    source: str
    revision: str | None
    aliases: tuple[str, ...]
    is_default: bool
    vllm_args: dict[str, Any]
    """Arguments of vLLM's engine, by vLLM's names."""
    frontend_args: dict[str, Any]
    """Arguments of vLLM's API server, by vLLM's names."""
    env: dict[str, str]
    gpu: str
    gpus: int
    """GPUs per replica; 0 on CPU."""
    num_cpus: float
    """Cores that Ray sets aside per replica."""
    replicas: int | None
    """None where `autoscaling` decides."""
    autoscaling: AutoscalingSpec | None = field(default=None)
    max_ongoing_requests: int = 1
    max_queued_requests: int | None = None
    max_model_len: int = 1
    max_num_seqs: int = 1
    speculative: dict[str, Any] | None = None
    drain_within_s: float = 600.0
    """Longest wait for running requests before a replica ends, seconds."""
    balancing: Balancing = "power-of-two"
    """How Serve chooses between the replicas."""

    @property
    def keeps_responses(self) -> bool:
        """Whether vLLM keeps responses for `previous_response_id`; 0.32 does not by default."""
        return self.env.get(RESPONSES_STORE, "0") not in ("", "0")


def plan_engines(stack: StackSpec) -> tuple[EnginePlan, ...]:
    """One plan per model and variant, in the file's order."""
    longest = stack.gateway.request_timeout_s
    return tuple(_plan(model, name, longest) for model in stack.models for name in model.variants)


def _plan(model: ModelSpec, variant: str, longest_request_s: float) -> EnginePlan:
    source = model.checked_source()
    settings = overlay(model, model.variants[variant])
    spec = model.variants[variant].speculative
    speculative = spec.to_vllm() if spec else None
    on_cpu = model.gpu == CPU
    max_num_seqs = settings.max_num_seqs or MAX_NUM_SEQS[on_cpu]
    max_model_len = settings.max_model_len or source.max_context
    vllm_args = _vllm_args(settings, source)
    vllm_args |= {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
    # Off on CPU, where its Mamba mode needs Triton, and with drafting, where it has lost answers.
    caching = settings.prefix_caching
    vllm_args["enable_prefix_caching"] = (
        not on_cpu and speculative is None if caching is None else caching
    )
    if speculative is not None:
        vllm_args["speculative_config"] = speculative
    vllm_args |= settings.engine_args
    frontend_args = _frontend_args(settings)
    env = (CPU_ENV if on_cpu else {}) | (IMAGES_ENV if settings.images else {}) | settings.env
    caches = bool(vllm_args["enable_prefix_caching"])
    env |= _probes(settings, drafts=speculative is not None, caches=caches).to_environment()
    gpus = 0 if on_cpu else _processes(settings)
    num_cpus = 1.0 if settings.num_cpus is None else settings.num_cpus
    decides = (model.gpu, gpus, num_cpus, vllm_args, frontend_args, env)
    return EnginePlan(
        model_id=model.id,
        variant=variant,
        app_name=_app_name(model.id, variant, decides),
        source=vllm_args["model"],
        revision=source.revision,
        aliases=model.aliases,
        is_default=variant == model.default_variant,
        vllm_args=vllm_args,
        frontend_args=frontend_args,
        env=env,
        gpu=model.gpu,
        gpus=gpus,
        num_cpus=num_cpus,
        replicas=None if settings.autoscaling else settings.replicas or 1,
        autoscaling=_autoscaling(settings.autoscaling, max_num_seqs),
        max_ongoing_requests=settings.max_ongoing_requests or 2 * max_num_seqs,
        max_queued_requests=settings.max_queued_requests,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        speculative=speculative,
        drain_within_s=longest_request_s,
        balancing=model.routing.balancing,
    )


def _vllm_args(settings: EngineSettings, source: InlineModel) -> dict[str, Any]:
    args: dict[str, Any] = {"model": str(source.path or source.repo)}
    if source.revision is not None:
        args["revision"] = source.revision
    given = {name: getattr(settings, name) for name in _SAME_NAME}
    args |= {name: value for name, value in given.items() if value is not None}
    if settings.expert_parallel is not None:
        args["enable_expert_parallel"] = settings.expert_parallel
    images = settings.images
    if images is None:
        # Sets every limit to 0 and leaves the vision tower (0.86 GiB on 27B) unloaded.
        args["language_model_only"] = True
    else:
        args["limit_mm_per_prompt"] = {"image": images.max_per_prompt, "video": 0, "audio": 0}
        args["allowed_media_domains"] = list(images.allowed_hosts) or [NO_HOST]
    return args


def _frontend_args(settings: EngineSettings) -> dict[str, Any]:
    if settings.tool_call_parser is None:
        return {}
    return {"enable_auto_tool_choice": True, "tool_call_parser": settings.tool_call_parser}


def _probes(settings: EngineSettings, *, drafts: bool, caches: bool) -> Probes:
    asked = settings.probes or ProbesSpec()
    if not asked.enabled or not (drafts or settings.probes):
        return Probes()
    parses = settings.tool_call_parser is not None
    return Probes(
        acceptance=drafts and asked.acceptance is not False,
        prefix=caches if asked.prefix is None else asked.prefix,
        tools=parses if asked.tools is None else asked.tools,
        long_context_tokens=asked.long_context_tokens if drafts else None,
        **asked.model_dump(
            include={"drafts", "min_acceptance", "within_s", "on_collapse"},
        ),
    )


def _processes(settings: EngineSettings) -> int:
    """GPUs one replica takes: one per tensor, pipeline and data parallel rank."""
    tensor, pipeline = settings.tensor_parallel_size or 1, settings.pipeline_parallel_size or 1
    return tensor * pipeline * (settings.data_parallel_size or 1)


def _autoscaling(spec: AutoscalingSpec | None, max_num_seqs: int) -> AutoscalingSpec | None:
    if spec is None or spec.target_ongoing_requests is not None:
        return spec
    # Below a full batch: a new replica takes minutes to load.
    target = max(1, max_num_seqs * 3 // 4)
    return spec.model_copy(update={"target_ongoing_requests": target})


def _app_name(model_id: str, variant: str, decides: tuple[Any, ...]) -> str:
    """`engine-<model>-<variant>-<hash>`, the hash over all that needs a new engine process.

    Left out: replicas, autoscaling, max_ongoing_requests and balancing, which Ray
    Serve changes on a running engine; aliases and the default variant, which are rows
    of the gateway's table.
    """
    text = json.dumps([model_id, variant, *decides], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    slug = re.sub(r"[^a-z0-9]+", "-", model_id.lower()).strip("-")
    return f"{ENGINE_PREFIX}{slug}-{variant}-{digest}"
