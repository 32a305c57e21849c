"""What to run, and why, in plain words and as settings of a stack file.

Owns the choice of n and of limits that fit, the rules about settings with their sources,
and the cautions. Leaves the figures to `plan`, writing the file to `stack_file`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from serving.planner.machine import runs_format
from serving.planner.plan import CPU, SMALL_CARD, Plan, Request, make_plan
from serving.planner.precision import FP8_BITS, INT4_BITS, NVFP4_BITS

# More has crashed vLLM on these models (vLLM issue 37035; still unbounded in 0.32).
MOST_DRAFT_TOKENS = 4
# Predictions of the speed-up are off by about this much in half of the published rows, so a
# smaller gain is none that can be told.
TELLING_GAIN = 1.1
SHORTEST_CONTEXT = 2_048
# The dtype of the GDN states is changed for a gain of this much, or where nothing fits else.
WORTH_A_CHANGE = 1.05
# What vLLM was compared with published figures on: one stream, and up to 8 on two RTX 3090s.
VALIDATED_GPUS = frozenset({"rtx3090", "rtxpro6000maxq", "strix-halo"})
VALIDATED_CONCURRENCY = 8
VALIDATED_CONTEXT = 8_192


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of a stack file, and why it is there."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to run; `plan` is the plan for it, which may differ from what was asked for."""

    plan: Plan
    fits: bool | None
    draft_tokens: int
    changes: tuple[str, ...]
    """What was changed of the request so that it fits."""
    settings: tuple[Setting, ...]
    """Of the model, for all variants."""
    drafting_settings: tuple[Setting, ...]
    """Of the variant that drafts."""
    speculative: tuple[Setting, ...]
    """Of its block `speculative`."""
    cautions: tuple[str, ...]

    @property
    def both_variants(self) -> bool:
        """Whether there are cards for an engine that drafts and one that does not."""
        return self.draft_tokens > 0 and self.plan.request.engines > 1


def recommend(request: Request) -> Recommendation:
    """What to run for `request`; raises CatalogError where it makes no sense."""
    request, changes = _fitting(request)
    plan = make_plan(request)
    draft_tokens = _draft_tokens(plan)
    return Recommendation(
        plan=plan,
        fits=plan.memory[draft_tokens].fits,
        draft_tokens=draft_tokens,
        changes=tuple(changes),
        settings=tuple(_settings(request)),
        drafting_settings=tuple(_drafting_settings(request)),
        speculative=tuple(_speculative(request, draft_tokens)),
        cautions=tuple(_cautions(plan, draft_tokens)),
    )


def _fitting(request: Request) -> tuple[Request, list[str]]:
    """The request, or the nearest one that fits: smaller state, fewer requests, shorter ones."""
    if request.memory is None:
        return request, []
    small, changes = _with_small_state(request)
    as_asked, smaller = _best_fitting(request), _best_fitting(small)
    if as_asked * WORTH_A_CHANGE >= smaller and as_asked:
        return request, []
    if smaller:
        return small, changes
    at_once = max(small.memory_plan(n).largest_concurrency or 0 for n in _candidates(small))
    if at_once:
        changes.append(f"{at_once} requests at once instead of {request.concurrency}")
        return replace(small, concurrency=at_once), changes
    alone = replace(small, concurrency=1)
    longest = alone.memory_plan(0).largest_context or 0
    if longest < SHORTEST_CONTEXT:
        return request, []
    changes.append(f"one request of {longest} tokens instead of {request.context}")
    shorter = replace(alone, context=longest, prompt=min(request.prompt, longest // 2))
    return shorter, changes


def _with_small_state(request: Request) -> tuple[Request, list[str]]:
    """The request with GDN states of half the size, where that was left open."""
    if request.model.architecture.gdn is None or request.ssm_dtype is not None:
        return request, []
    why = "mamba_ssm_cache_dtype float16, which halves the GDN states"
    return replace(request, ssm_dtype="float16"), [why]


def _candidates(request: Request) -> tuple[int, ...]:
    """Numbers of draft tokens that may be recommended."""
    return tuple(range(MOST_DRAFT_TOKENS + 1)) if request.can_draft else (0,)


def _best_fitting(request: Request) -> float:
    """Predicted tokens/s of the fastest n that fits; 0 where none does."""
    fitting = (n for n in _candidates(request) if request.memory_plan(n).fits)
    return max((request.decode(n).tokens_per_s for n in fitting), default=0.0)


def _draft_tokens(plan: Plan) -> int:
    """The n that decodes fastest of those that fit and may be recommended; 0 for a small gain."""
    allowed = [
        each
        for each in plan.speeds[: MOST_DRAFT_TOKENS + 1]
        if plan.memory[each.draft_tokens].fits is not False
    ]
    if not allowed:
        return 0
    best = max(allowed, key=lambda each: each.tokens_per_s)
    return best.draft_tokens if best.speedup >= TELLING_GAIN else 0


def _settings(request: Request) -> Iterator[Setting]:
    yield Setting("max_model_len", request.context, "longest prompt plus answer, tokens")
    yield Setting("max_num_seqs", request.concurrency, "requests decoded at the same time")
    if request.gpu.id == CPU:
        return
    if request.cards > 1:
        yield Setting("tensor_parallel_size", request.cards, "a part of every layer on each card")
    small = request.memory is not None and request.memory <= SMALL_CARD
    why = "vLLM's profiler misses the GDN workspace: no more with MTP" if small else "of the memory"
    yield Setting("gpu_memory_utilization", request.share, why)
    if small:
        yield Setting("max_num_batched_tokens", request.batched_tokens, "keeps activations small")
    if request.kv_dtype != "bfloat16":
        yield Setting("kv_cache_dtype", request.kv_dtype, "as asked for")
    if request.ssm_dtype is not None:
        yield Setting("mamba_ssm_cache_dtype", request.ssm_dtype, "type of the GDN states")
    if request.model.model_type in ("qwen3_5", "qwen3_5_moe"):
        yield Setting("reasoning_parser", "qwen3", "<think> becomes reasoning_content")
        yield Setting("tool_call_parser", "qwen3_coder", "the recipe's")
    if environment := _environment(request):
        yield Setting("env", environment, "known troubles, docs/planner.md")


def _environment(request: Request) -> dict[str, str]:
    bits = request.setup.target.precision.bits["experts"]
    found = {}
    if request.cards > 1:
        # True aborts CUDA graph capture with custom all-reduce (HyperQwen issue 163).
        found["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:False"
    if bits == FP8_BITS and request.gpu.id in ("rtxpro6000", "rtxpro6000maxq", "gb10"):
        found["VLLM_USE_DEEP_GEMM"] = "0"
    return found


def _drafting_settings(request: Request) -> Iterator[Setting]:
    if request.model.architecture.gdn is not None and request.gpu.id != CPU:
        # vLLM PR 43650, issues 43559, 53912, 35800.
        yield Setting("prefix_caching", False, "with MTP on GDN models it has lost answers")


def _speculative(request: Request, draft_tokens: int) -> Iterator[Setting]:
    yield Setting("method", "mtp", "the head inside the checkpoint")
    yield Setting("num_speculative_tokens", draft_tokens, "predicted to be fastest; measure it")
    if request.model.draft is not None:
        yield Setting("model", request.model.draft.repo, "the drafting checkpoint")
    if request.model.architecture.experts is None or request.gpu.id == CPU:
        return
    bits = request.setup.target.precision.bits["experts"]
    blackwell = request.gpu.sm is not None and request.gpu.sm == (12, 0)
    if bits == NVFP4_BITS and blackwell:
        yield Setting("moe_backend", "flashinfer_cutlass", "the recipe's choice for this head")
    elif bits in (NVFP4_BITS, INT4_BITS, FP8_BITS):
        yield Setting("moe_backend", "triton", "the recipe's choice for this head")


def _cautions(plan: Plan, draft_tokens: int) -> Iterator[str]:
    request = plan.request
    checkpoint = request.model.checkpoint(request.checkpoint)
    if draft_tokens and checkpoint.mtp_head is None and request.model.draft is None:
        yield (
            f"nobody has looked whether {checkpoint.repo or checkpoint.path} holds the MTP head: "
            "vLLM drafts with uninitialised weights where a quantised checkpoint lacks it"
        )
    if plan.size_error is not None and abs(plan.size_error) > 0.05:
        yield (
            f"the parts of the weights add up to {plan.size_error:+.0%} of the published size: "
            "this export keeps other layers in bf16 than assumed"
        )
    if request.gpu.compute_capability == "7.0":
        yield "no bf16 on this card: run in float16 (engine_args: dtype)"
    if not runs_format(request.gpu, request.setup.target.precision.bits["attention"]):
        yield "this class has no kernels for the checkpoint's attention layers"
    if request.gpu.compute_capability is None and request.gpu.id != CPU:
        yield f"{request.gpu.id} has no CUDA: these figures are vLLM's with CUDA kernels"
    if plan.memory[draft_tokens].fits is None:
        yield "the memory of this class is the machine's: give --memory to learn what fits"
    yield from outside_validation(request)


def outside_validation(request: Request) -> Iterator[str]:
    """Where the plan goes beyond what its predictions were compared with."""
    if request.gpu.id not in VALIDATED_GPUS and request.gpu.id != CPU:
        known = ", ".join(sorted(VALIDATED_GPUS))
        yield f"outside validation: vLLM on {request.gpu.id} (compared only on {known})"
    if request.gpu.id == CPU:
        yield "outside validation: on a CPU fixed costs decide; run `moe-serving plan calibrate`"
    if request.concurrency > VALIDATED_CONCURRENCY:
        yield f"outside validation: more than {VALIDATED_CONCURRENCY} requests at once"
    if request.depth > VALIDATED_CONTEXT:
        yield f"outside validation: {request.depth} tokens deep; acceptance falls with depth"
    if request.model.draft is not None:
        yield f"outside validation: {request.model.id} and its drafting checkpoint"
    if "prior" in request.acceptance.source:
        yield "acceptance is a prior, not measured; the prompts alone move speed by up to 2x"
