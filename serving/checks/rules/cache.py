"""Rules about prefix caching and the KV cache's type: MTP201 to MTP219."""

from __future__ import annotations

from collections.abc import Iterator

from serving.catalog.models import KV_DTYPE_BYTES
from serving.checks.facts import Facts
from serving.checks.finding import OPEN, Severity, rule
from serving.checks.versions import vllm
from serving.planner.memory import hybrid_block_tokens, shortest_prefix_hit

# The attention backends that read an FP8 KV cache only from these capabilities on.
FIRST_FP8_KV = {"TRITON_ATTN": (8, 9), "FLASH_ATTN": (9, 0)}
SM_120 = 12


def _corruptible(facts: Facts) -> bool:
    return facts.mtp and facts.hybrid and facts.prefix_caching


@rule(
    "MTP201",
    "MTP with prefix caching, before the fix",
    Severity.ERROR,
    effect="States of GDN layers are reused where they do not belong: about 20 % less accuracy, "
    "one answer in eight empty, broken tool calls, until the engine is restarted.",
    cure="Set prefix_caching: false, or upgrade vLLM and read MTP202.",
    thread="vllm-project/vllm#43559; vllm-project/vllm#35800",
    versions=vllm(since="0.17", before="0.26"),
)
def poisoned_prefixes(facts: Facts) -> Iterator[str]:
    """On hybrid models."""
    if _corruptible(facts):
        yield "method mtp and prefix caching on a model with GDN layers"


@rule(
    "MTP202",
    "MTP with prefix caching",
    Severity.WARNING,
    effect="The worst fault is fixed, but crashes, corrupted output and tool calls written as text "
    "are still reported.",
    cure="Set prefix_caching: false for the drafting variant, and keep it on in a plain one.",
    thread="vllm-project/vllm#53912; vllm-project/vllm#47194; NVIDIA/dgx-spark-playbooks#89",
    versions=vllm(since="0.26"),
)
def doubtful_prefixes(facts: Facts) -> Iterator[str]:
    """On hybrid models."""
    if _corruptible(facts):
        yield "method mtp and prefix caching on a model with GDN layers"


@rule(
    "MTP203",
    "short prefixes are never found",
    Severity.NOTE,
    effect="A block of a hybrid model holds many tokens and drafting gives up the last one, so "
    "that requests sharing less than this recompute all of it.",
    cure="Take mamba_ssm_cache_dtype: float16 and a bf16 KV cache for smaller blocks, or cache in "
    "a plain variant.",
    thread="vllm-project/vllm#38182; syv-ai/HyperQwen, gotcha 39",
    versions=vllm(since="0.17"),
)
def short_prefixes(facts: Facts) -> Iterator[str]:
    """The length follows from the block size, exactly."""
    tokens = prefix_floor(facts)
    if _corruptible(facts) and tokens is not None:
        yield f"prefixes below {tokens} tokens are never found (blocks of {tokens // 2})"


def prefix_floor(facts: Facts) -> int | None:
    """Tokens two requests must share while drafting; None where the block size is not known."""
    kv_dtype = "bfloat16" if facts.kv_dtype == "auto" else facts.kv_dtype
    finer = facts.args.get("prefix_match_unit")
    kept = facts.speculative.get("disable_eagle_block_drop")
    if facts.architecture is None or kv_dtype not in KV_DTYPE_BYTES or finer or kept:
        return None
    ssm_dtype = facts.text("mamba_ssm_cache_dtype")
    block = hybrid_block_tokens(
        facts.architecture,
        facts.draft_tokens,
        kv_dtype=kv_dtype,
        ssm_dtype=None if ssm_dtype in ("", "auto") else ssm_dtype,
        tensor_parallel=facts.tensor_parallel,
    )
    return shortest_prefix_hit(block, drafting=True)


@rule(
    "MTP204",
    "MTP with a TurboQuant KV cache",
    Severity.ERROR,
    effect="The engine stops with \"Unknown TurboQuant cache dtype: 'auto'\", or the text falls "
    "into loops while every metric looks healthy.",
    cure="Take fp8 or bf16 as kv_cache_dtype, or do not draft.",
    thread="vllm-project/vllm#40094; vllm-project/vllm#40831; vllm-project/vllm#53180",
    versions=vllm(since="0.20"),
)
def turboquant(facts: Facts) -> Iterator[str]:
    """Any of its four types."""
    if facts.draft_tokens and facts.kv_dtype.startswith("turboquant"):
        yield f"kv_cache_dtype {facts.kv_dtype} with method {facts.spec_method or 'unnamed'}"


@rule(
    "MTP205",
    "an NVFP4 KV cache on compute capability 12.0",
    Severity.ERROR,
    effect="The engine refuses it, and where it was patched in the text came out garbled.",
    cure="Take kv_cache_dtype: fp8, or upgrade vLLM.",
    thread="vllm-project/vllm#43562; vllm-project/vllm#46329; vllm-project/vllm#49011",
    # 0.29 refused it; 0.32.0's FlashInfer backend takes it (v1/attention/backends/flashinfer.py).
    versions=vllm(before="0.32"),
)
def nvfp4_kv(facts: Facts) -> Iterator[str]:
    """RTX 50 and RTX PRO 6000 cards."""
    if facts.sm is not None and facts.sm[0] == SM_120 and facts.kv_dtype.startswith("nvfp4"):
        yield f"kv_cache_dtype {facts.kv_dtype} on {facts.gpu_name}"


@rule(
    "MTP206",
    "an attention backend that cannot read the FP8 KV cache",
    Severity.ERROR,
    effect="The engine does not start.",
    cure="Remove the backend, take FLASHINFER, or kv_cache_dtype: auto.",
    thread="syv-ai/HyperQwen, gotcha 40; vLLM 0.32.0, v1/attention/backends/triton_attn.py",
    versions=vllm(since="0.17"),
)
def fp8_kv_backend(facts: Facts) -> Iterator[str]:
    """TRITON_ATTN asks for compute capability 8.9, FLASH_ATTN for 9.0."""
    first = FIRST_FP8_KV.get(facts.attention_backend)
    if first and facts.kv_dtype.startswith("fp8") and facts.sm is not None and facts.sm < first:
        yield f"{facts.attention_backend} with {facts.kv_dtype} on {facts.gpu_name}"


@rule(
    "MTP207",
    "an FP8 KV cache where one backend reads it",
    Severity.WARNING,
    effect="Before compute capability 8.9 only FlashInfer reads it, so that without a working "
    "FlashInfer the engine does not start; it also doubles the block size of a hybrid model.",
    cure="Make sure that FlashInfer is installed, or take kv_cache_dtype: auto.",
    thread="syv-ai/HyperQwen, gotcha 40",
    versions=vllm(since="0.17"),
)
def fp8_kv_on_ampere(facts: Facts) -> Iterator[str]:
    """RTX 30 cards and A100."""
    if facts.sm is None or facts.sm >= FIRST_FP8_KV["TRITON_ATTN"]:
        return
    if facts.kv_dtype.startswith("fp8") and facts.attention_backend in ("", "FLASHINFER"):
        yield f"kv_cache_dtype {facts.kv_dtype} on {facts.gpu_name}"


@rule(
    "MTP208",
    "an FP8 KV cache lowers acceptance",
    Severity.NOTE,
    effect="Measured on one model, 0.73 of the drafts were accepted with a bf16 cache and 0.63 "
    "with fp8.",
    cure="Measure both, or give the drafter a type of its own: speculative.kv_cache_dtype.",
    thread="vllm-project/vllm#55557",
    versions=vllm(since="0.17"),
)
def fp8_kv_acceptance(facts: Facts) -> Iterator[str]:
    """Unless the drafter has its own."""
    if (
        facts.mtp
        and facts.kv_dtype.startswith("fp8")
        and not facts.speculative.get("kv_cache_dtype")
    ):
        yield f"kv_cache_dtype {facts.kv_dtype} for target and drafter"


@rule(
    "MTP209",
    "a KV connector on a hybrid model",
    Severity.WARNING,
    effect="Offloaded or transferred GDN states came back as garbage, or the tier stayed unused.",
    cure="Remove kv_transfer_config, or compare answers with and without it first.",
    thread="LMCache/LMCache#4247; syv-ai/HyperQwen, gotcha 38",
    versions=vllm(since="0.17"),
)
def kv_connector(facts: Facts) -> Iterator[str]:
    """With or without drafting; drafting adds states to go wrong."""
    block = facts.args.get("kv_transfer_config")
    if facts.hybrid and isinstance(block, dict) and block:
        yield f"kv_transfer_config with {block.get('kv_connector', 'a connector')}"


@rule(
    "MTP210",
    "prefix caching of a hybrid model on a CPU",
    Severity.ERROR,
    effect="The engine stops: this mode of the GDN cache needs Triton.",
    cure="Set prefix_caching: false (--no-enable-prefix-caching).",
    thread="seen here on vLLM 0.32.0, CPU (docs/checks.md)",
    versions=vllm(since="0.32"),
    status=OPEN,
)
def prefixes_on_cpu(facts: Facts) -> Iterator[str]:
    """By argument or by default."""
    if facts.on_cpu and facts.hybrid and facts.prefix_caching:
        yield "prefix caching is on"
