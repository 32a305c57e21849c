"""Settings of an engine that a model and each of its variants may give.

Owns `EngineSettings`, its parts and how a variant's values win over the model's.
Leaves defaults that depend on the hardware to `engine_plan`.
"""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from serving.catalog.errors import FieldError
from serving.stack.speculative import KvCacheDtype

# Whole words at the end of a part of the name: TOKENIZERS_PARALLELISM is no secret.
_SECRET = re.compile(r"(KEYS?|TOKEN|SECRETS?|PASSWORDS?|PASSWD|CREDENTIALS?)(_|$)")

# vLLM arguments that have a field of their own here, and the field's name.
TYPED_ARGS = {
    "enable_expert_parallel": "expert_parallel",
    "enable_prefix_caching": "prefix_caching",
    "enable_auto_tool_choice": "tool_call_parser",
    "limit_mm_per_prompt": "images.max_per_prompt",
    "language_model_only": "images",
    "allowed_media_domains": "images.allowed_hosts",
    "speculative_config": "speculative of the variant",
    "spec_method": "speculative.method of the variant",
    "spec_model": "speculative.model of the variant",
    "spec_tokens": "speculative.num_speculative_tokens of the variant",
    "model": "model or inline of the model",
    "revision": "inline.revision of the model",
    "served_model_name": "id and aliases of the model",
    "allowed_origins": "gateway.cors_origins",
    "host": "gateway.host",
    "port": "gateway.port",
    "ssl_certfile": "gateway.tls.cert_file",
    "ssl_keyfile": "gateway.tls.key_file",
    "sse_keep_alive_interval": "gateway.keep_alive_s",
}
# Arguments that would open an engine's port or put a secret into the file.
_REFUSED_ARGS = {
    "api_key": "the stack makes its engines' key itself",
    "middleware": "the stack guards its engines' ports itself",
    "uds": "engines listen on a port that the stack chooses",
    "hf_token": "set HF_TOKEN in the environment instead",
}

# How often Ray Serve 2.60 hears of running requests, seconds; an average needs more than one.
METRICS_INTERVAL_S = 10


class Spec(BaseModel):
    """Base of every block of a stack file: no unknown keys, no conversions, no changes.

    Tuples are marked `strict=False`, since the file has lists; their items stay strict.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ImagesSpec(Spec):
    """Images in requests; a model without this block refuses them."""

    max_per_prompt: int = Field(default=1, ge=1, description="images in one request")
    allowed_hosts: tuple[str, ...] = Field(
        strict=False,
        default=(),
        description="hosts that images may come from; empty: data URLs only",
    )


class AutoscalingSpec(Spec):
    """Ray Serve's autoscaling of one engine: its own names, meanings and defaults."""

    min_replicas: int = Field(
        default=1, ge=0, description="replicas kept when idle; 0: a request starts the first"
    )
    initial_replicas: int | None = Field(
        default=None, ge=0, description="replicas that `up` starts; min_replicas"
    )
    max_replicas: int = Field(ge=1, description="most replicas")
    target_ongoing_requests: int | None = Field(
        default=None, ge=1, description="requests per replica aimed at; 3/4 of max_num_seqs"
    )
    look_back_period_s: float = Field(
        default=30, gt=METRICS_INTERVAL_S, description="requests are averaged over so long, seconds"
    )
    upscale_delay_s: float = Field(
        default=30, ge=0, description="too few replicas for so long: more, seconds"
    )
    downscale_delay_s: float = Field(
        default=600, ge=0, description="too many replicas for so long: fewer, seconds"
    )
    downscale_to_zero_delay_s: float | None = Field(
        default=None, ge=0, description="the same for the last one; downscale_delay_s"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            text = f"found {self.min_replicas}, above max_replicas ({self.max_replicas}); lower it"
            raise FieldError(text, "min_replicas")
        first = self.initial_replicas
        if first is not None and not self.min_replicas <= first <= self.max_replicas:
            bounds = f"min_replicas ({self.min_replicas}) and max_replicas ({self.max_replicas})"
            raise FieldError(f"found {first}; choose a number between {bounds}", "initial_replicas")
        if self.downscale_to_zero_delay_s is not None and self.min_replicas > 0:
            raise FieldError(
                f"given, but min_replicas is {self.min_replicas}, so the last replica stays; "
                "remove it, or set min_replicas: 0",
                "downscale_to_zero_delay_s",
            )
        return self


class ProbesSpec(Spec):
    """What an engine is asked before it takes requests, and what is watched while it runs."""

    enabled: bool = Field(default=True, description="false: none of the below")
    acceptance: bool | None = Field(
        default=None, description="is enough of what it drafts accepted; on where it drafts"
    )
    min_acceptance: float = Field(
        default=0.1, ge=0, lt=1, description="accepted / drafted tokens, at least"
    )
    drafts: int = Field(default=200, ge=1, description="drafts looked at, at least")
    prefix: bool | None = Field(
        default=None, description="is an answer the same from cache; on with prefix caching"
    )
    tools: bool | None = Field(
        default=None, description="is a streamed call parsed; on with a tool_call_parser"
    )
    long_context_tokens: int | None = Field(
        default=None, ge=1, description="acceptance after so many tokens too; off where absent"
    )
    within_s: float = Field(default=120.0, gt=0, description="for all probes together, seconds")
    on_collapse: Literal["warn", "drain"] = Field(
        default="warn",
        description="when acceptance collapses later: log and count it, or take no more requests",
    )


class EngineSettings(Spec):
    """What a model, and each variant over it, may set about its engine."""

    tensor_parallel_size: int | None = Field(
        default=None, ge=1, description="GPUs that share every layer"
    )
    pipeline_parallel_size: int | None = Field(
        default=None, ge=1, description="groups of GPUs that split the layers"
    )
    data_parallel_size: int | None = Field(
        default=None, ge=1, description="copies of the model inside one engine"
    )
    expert_parallel: bool | None = Field(
        default=None, description="spread whole experts over GPUs instead of slicing each"
    )
    max_model_len: int | None = Field(
        default=None, ge=16, description="longest prompt plus answer, in tokens"
    )
    max_num_seqs: int | None = Field(
        default=None, ge=1, description="requests decoded at the same time"
    )
    max_num_batched_tokens: int | None = Field(
        default=None, ge=1, description="tokens in one step, prefill included"
    )
    gpu_memory_utilization: float | None = Field(
        default=None, gt=0, le=1, description="share of the GPU's memory the engine takes"
    )
    kv_cache_dtype: KvCacheDtype | None = Field(default=None, description="type of the KV cache")
    mamba_ssm_cache_dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = Field(
        default=None, description="type of the GDN layers' state"
    )
    prefix_caching: bool | None = Field(default=None, description="reuse the KV of shared prompts")
    reasoning_parser: str | None = Field(default=None, description="qwen3 for the Qwen3 family")
    tool_call_parser: str | None = Field(default=None, description="qwen3_coder for Qwen3.5 on")
    images: ImagesSpec | None = Field(default=None, description="absent: images are refused")
    replicas: int | None = Field(default=None, ge=1, description="engines of this variant")
    autoscaling: AutoscalingSpec | None = Field(default=None, description="instead of replicas")
    max_ongoing_requests: int | None = Field(
        default=None, ge=1, description="requests a replica takes before others wait; 2 x seqs"
    )
    max_queued_requests: int | None = Field(
        default=None, ge=0, description="requests that may wait for the variant; 4 for each slot"
    )
    num_cpus: float | None = Field(default=None, ge=0, description="cores Ray sets aside")
    probes: ProbesSpec | None = Field(
        default=None, description="questions before it serves; on for what drafts"
    )
    env: dict[str, str] = Field(default={}, description="environment of the engine; no secrets")
    engine_args: dict[str, Any] = Field(
        default={}, description="any other argument of vLLM, by its own name"
    )

    @field_validator("env")
    @classmethod
    def _no_secrets(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if _SECRET.search(name.upper()):
                cure = "a stack file is no place for secrets; set it in the environment instead"
                raise FieldError(cure, name)
        return env

    @field_validator("engine_args")
    @classmethod
    def _known_args(cls, args: dict[str, Any]) -> dict[str, Any]:
        for name in args:
            if name in _REFUSED_ARGS:
                raise FieldError(f"refused: {_REFUSED_ARGS[name]}; remove it", name)
            typed = name if name in EngineSettings.model_fields else TYPED_ARGS.get(name)
            if typed is not None:
                raise FieldError(f"has a field of its own; write {typed} outside engine_args", name)
        if args:
            from serving.engines.vllm_args import check_engine_args

            for name, cure in check_engine_args(args).items():
                raise FieldError(cure, name)
        return args

    @model_validator(mode="after")
    def _one_way_to_scale(self) -> Self:
        if self.replicas is not None and self.autoscaling is not None:
            raise FieldError("given beside autoscaling; keep one of the two", "replicas")
        return self


def overlay(base: EngineSettings, over: EngineSettings) -> EngineSettings:
    """`base` with every setting that `over` gives; env and engine_args merge key by key.

    A setting given as null in `over` takes the value away again. `replicas` and
    `autoscaling` are two ways to say one thing, so either replaces both.
    """
    own = {name: getattr(over, name) for name in over.model_fields_set & FIELDS}
    values = {name: getattr(base, name) for name in FIELDS}
    if {"replicas", "autoscaling"} & own.keys():
        values |= {"replicas": None, "autoscaling": None}
    for name in ("env", "engine_args"):
        own[name] = values[name] | own.get(name, {})
    return EngineSettings.model_construct(**values | own)


FIELDS = frozenset(EngineSettings.model_fields)
