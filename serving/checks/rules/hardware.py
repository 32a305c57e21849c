"""Rules about cards and kernels: MTP401 to MTP419."""

from __future__ import annotations

from collections.abc import Iterator

from serving.checks.facts import Facts
from serving.checks.finding import BY_DESIGN, Severity, rule
from serving.checks.versions import vllm

# vLLM's profiler misses the drafter's GDN workspace, which 7 % of a 24 GB card holds.
SMALL_CARD_GIB = 24
SAFE_UTILISATION = 0.93


@rule(
    "MTP401",
    "FP8 weights on a card that does not compute in FP8",
    Severity.NOTE,
    effect="Marlin unpacks them to bf16 arithmetic: half the memory of bf16, and no faster for "
    "many requests; drafting gains while memory bandwidth is the limit.",
    cure="Nothing to do; a 4-bit export decodes faster on such a card.",
    thread="vLLM 0.32.0, model_executor/layers/quantization",
    versions=vllm(),
    status=BY_DESIGN,
)
def fp8_weights(facts: Facts) -> Iterator[str]:
    """What really runs before compute capability 8.9."""
    if facts.gpu and facts.sm and facts.quantisation == "fp8" and facts.gpu.fp8 == "weight-only":
        yield f"FP8 weights on {facts.gpu.id}: they run as W8A16 in Marlin"


@rule(
    "MTP402",
    "NVFP4 weights on a card that does not compute in NVFP4",
    Severity.NOTE,
    effect="Marlin unpacks them to bf16 arithmetic: the memory of 4 bits, the arithmetic of 16.",
    cure="Nothing to do; INT4 exports run through the same kernels.",
    thread="vLLM 0.32.0, model_executor/layers/quantization",
    versions=vllm(),
    status=BY_DESIGN,
)
def nvfp4_weights(facts: Facts) -> Iterator[str]:
    """What really runs before compute capability 10.0."""
    if facts.gpu and facts.sm and facts.quantisation == "nvfp4" and facts.gpu.nvfp4 == "emulated":
        yield f"NVFP4 weights on {facts.gpu.id}: they run as W4A16 in Marlin"


@rule(
    "MTP403",
    "the drafter inherits Marlin for its experts",
    Severity.ERROR,
    effect="The engine stops: moe_backend='marlin' is not supported for unquantized MoE, which the "
    "head's experts are.",
    cure="Add moe_backend: triton to the speculative block.",
    thread="vllm-project/vllm#56832; vllm-project/recipes, Qwen3.6-35B-A3B",
    versions=vllm(since="0.24"),
)
def marlin_drafter(facts: Facts) -> Iterator[str]:
    """Where the target's backend is set; left alone, each chooses its own."""
    own = facts.speculative.get("moe_backend")
    backend = own if isinstance(own, str) else facts.text("moe_backend")
    if facts.own_head and facts.moe and backend.lower() == "marlin":
        yield f"moe_backend marlin {'in the speculative block' if own else 'for the target'}"


@rule(
    "MTP404",
    "too large a share of a small card's memory",
    Severity.WARNING,
    effect="vLLM's profiler does not see the drafter's GDN workspace, and the engine runs out of "
    "memory under load.",
    cure=f"Lower gpu_memory_utilization to {SAFE_UTILISATION} or less.",
    thread="syv-ai/HyperQwen, gotcha 4; noonghunna/club-3090#613",
    versions=vllm(since="0.17"),
)
def utilisation(facts: Facts) -> Iterator[str]:
    """Cards of 24 GB and less."""
    share = facts.args.get("gpu_memory_utilization")
    size = facts.gpu.memory_gib if facts.gpu else None
    if not facts.mtp or not isinstance(share, int | float) or size is None:
        return
    if size <= SMALL_CARD_GIB and share > SAFE_UTILISATION:
        yield f"gpu_memory_utilization {share} with method mtp on {size:g} GiB"
