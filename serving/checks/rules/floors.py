"""Rules about versions that are too old: MTP501 to MTP519."""

from __future__ import annotations

from collections.abc import Iterator

from serving.checks.config import QWEN3_5
from serving.checks.facts import Facts
from serving.checks.finding import BY_DESIGN, Severity, rule
from serving.checks.rules.cache import SM_120
from serving.checks.rules.head import ASSISTANTS
from serving.checks.versions import vllm


@rule(
    "MTP501",
    "vLLM is older than the architecture",
    Severity.ERROR,
    effect="The engine does not know the model and does not start.",
    cure="Upgrade vLLM to 0.17 or newer.",
    thread="vllm-project/recipes, Qwen3.6-27B",
    versions=vllm(before="0.17"),
    status=BY_DESIGN,
)
def before_qwen3_5(facts: Facts) -> Iterator[str]:
    """Qwen3.5, 3.6 and 3.8."""
    if facts.model_type in QWEN3_5:
        yield f"{facts.model_type} with vLLM {facts.version}"


@rule(
    "MTP502",
    "vLLM is older than these NVFP4 exports",
    Severity.ERROR,
    effect="Loading fails, or layers that are not in NVFP4 are read wrongly.",
    cure="Upgrade vLLM to 0.24 or newer.",
    thread="vllm-project/recipes, Qwen3.6-27B",
    versions=vllm(before="0.24"),
    status=BY_DESIGN,
)
def before_nvfp4(facts: Facts) -> Iterator[str]:
    """NVFP4 checkpoints of this family."""
    if facts.model_type in QWEN3_5 and facts.quantisation == "nvfp4":
        yield f"an NVFP4 checkpoint with vLLM {facts.version}"


@rule(
    "MTP503",
    "vLLM is older than NVFP4 on this card",
    Severity.WARNING,
    effect="The recipe asks for 0.28 or newer on compute capability 12.0.",
    cure="Upgrade vLLM to 0.28 or newer.",
    thread="vllm-project/recipes, Qwen3.6-27B",
    versions=vllm(since="0.24", before="0.28"),
    status=BY_DESIGN,
)
def before_nvfp4_on_sm120(facts: Facts) -> Iterator[str]:
    """RTX 50 and RTX PRO 6000 cards."""
    if facts.sm is not None and facts.sm[0] == SM_120 and facts.quantisation == "nvfp4":
        yield f"NVFP4 weights on {facts.gpu_name} with vLLM {facts.version}"


@rule(
    "MTP504",
    "vLLM is older than MTP for Gemma 4",
    Severity.ERROR,
    effect="The assistant is taken for a plain drafting model and refused.",
    cure="Upgrade vLLM to 0.21 or newer.",
    thread="vllm-project/vllm#41745; vllm-project/vllm#42005",
    versions=vllm(before="0.21"),
    status=BY_DESIGN,
)
def before_gemma4_mtp(facts: Facts) -> Iterator[str]:
    """With its assistant named."""
    if facts.model_type.startswith(ASSISTANTS) and facts.draft_tokens:
        yield f"drafting for {facts.model_type} with vLLM {facts.version}"
