"""Every number of the speed model that is neither a model's nor a GPU's own.

Owns the constants, with where each comes from, and which engine belongs to which
family. Leaves the formulas that use them to `speed`, fitting the four fitted ones to
`fit`. docs/planner.md has the same table, and how stable the fit is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from serving.planner.errors import PlannerError


@dataclass(frozen=True, slots=True)
class Constants:
    """What holds for every engine. Times in seconds, the rest shares of 1."""

    bandwidth_fraction: float = 0.84
    """Share of the peak memory bandwidth that a decode step reaches. Fitted."""
    expert_layer_s: float = 50e-6
    """Routing and small expert kernels of one mixture-of-experts layer, per pass. Fitted."""
    routing_correlation: float = 0.7
    """Neighbouring tokens share experts: the second one counts as so much of a new token.
    Up to 31 % fewer experts than independent routing (Cohere, 2026-04-21)."""
    tensor_fraction: float = 0.84
    """Share of the tensor cores' peak that small-batch matrix products reach: an RTX 3090
    took 4.5 ms per further request where the peak allows 3.8 (syv-ai/HyperQwen, C1 to C8)."""
    prefill_fraction: float = 0.5
    """Share of that peak that prefill reaches: 0.37 to 0.76 in published prefill speeds."""
    prefill_tax: float = 0.17
    """How much longer prefill takes while drafting: 7 to 17 % published, the highest taken."""
    allreduce_s: float = 15e-6
    """One all-reduce of a few KB between cards without NVLink. Assumed."""


CONSTANTS = Constants()


@dataclass(frozen=True, slots=True)
class EngineFamily:
    """How a family of engines spends time beside reading weights. Times in seconds."""

    name: str
    step_s: float
    """Fixed cost of a decode step: scheduling, launching, sampling."""
    draft_s: float
    """Fixed cost of one drafted token's pass through the MTP layer."""
    speculation_s: float = 0.0
    """Fixed cost of a step with drafts beside that: rejection sampling, more metadata."""
    vector_fraction: float | None = None
    """Share of the float32 peak that small batches are computed at, beside reading and not
    behind it; None where tensor cores compute them while weights are read."""
    expert_layers: bool = True
    """Whether `Constants.expert_layer_s` comes on top of the step, or is in it as measured."""
    expert_token_s: float = 0.0
    """Per mixture-of-experts layer again for each further token of a small batch."""
    default_draft_tokens: int = 2
    """n where a published row names none."""


# A draft's pass pays half of the fixed cost of a step, since nothing is scheduled for it (assumed).
DRAFT_SHARE = 0.5
# Batches up to this size use llama.cpp's mat-vec kernels, which compute on the vector units
# (ggml-cuda, MMVQ_MAX_BATCH_SIZE); above it tensor cores do.
VECTOR_BATCH = 8

LLAMA_CPP = EngineFamily(
    name="llama.cpp",
    # Measured with the demo model on a CPU, where nothing else takes time.
    step_s=1e-3,
    draft_s=1e-3 * DRAFT_SHARE,
    # Fitted, the family's one.
    vector_fraction=0.35,
    # Half of a layer's cost: experts of a small batch are run token by token.
    expert_token_s=25e-6,
)
VLLM = EngineFamily(
    name="vllm",
    # Fitted, the family's one.
    step_s=2e-3,
    draft_s=2e-3 * DRAFT_SHARE,
)
# vLLM's CPU build on one OpenMP thread; `plan calibrate` measures a machine's own. The step is
# docs/benchmarks.md's TPOT of the demo model, the other two follow its model card.
VLLM_CPU = EngineFamily(
    name="vllm on cpu", step_s=6e-3, draft_s=1e-3, speculation_s=3e-3, expert_layers=False
)

_FAMILIES = {
    "llama": LLAMA_CPP,
    "ollama": LLAMA_CPP,
    "lm studio": LLAMA_CPP,
    "lmstudio": LLAMA_CPP,
    "gguf": LLAMA_CPP,
    "vllm": VLLM,
    "sglang": VLLM,
    "tensorrt": VLLM,
}


def find_family(engine: str) -> EngineFamily:
    """The family that an engine's name belongs to; raises PlannerError.

    By part of the name, so that `vllm (patched)` and `ik_llama.cpp` are found. SGLang and
    TensorRT-LLM share vLLM's kernels and structure, and its constants; no measurement here
    checks that.
    """
    name = engine.lower()
    for part, family in _FAMILIES.items():
        if part in name:
            return family
    raise PlannerError(
        f"engine: found {engine!r}, of which no constants are known; "
        f"the families are {LLAMA_CPP.name} and {VLLM.name}"
    )


def with_step(family: EngineFamily, step_s: float) -> EngineFamily:
    """The family with another fixed cost per step, and the drafts' share of it."""
    return replace(family, step_s=step_s, draft_s=step_s * DRAFT_SHARE)
