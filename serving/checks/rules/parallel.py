"""Rules about several cards, changing n and scheduling: MTP301 to MTP319."""

from __future__ import annotations

from collections.abc import Iterator

from serving.checks.facts import DYNAMIC_N, Facts
from serving.checks.finding import BY_DESIGN, Severity, rule
from serving.checks.versions import vllm


def _pipelined(facts: Facts) -> str | None:
    stages = facts.number("pipeline_parallel_size", 1)
    return f"pipeline_parallel_size {stages} with method mtp" if facts.mtp and stages > 1 else None


@rule(
    "MTP301",
    "MTP with pipeline parallelism",
    Severity.ERROR,
    effect="The drafter is refused, deadlocks, or skips its first layer and accepts about 1 %.",
    cure="Use tensor parallelism, or do not draft, or upgrade vLLM.",
    thread="vllm-project/vllm#49355; vllm-project/vllm#36643; vllm-project/vllm#46994",
    # 0.32.0 is the first version read with pull request 46994 in it.
    versions=vllm(before="0.32"),
)
def pipelined(facts: Facts) -> Iterator[str]:
    """Whatever runs it."""
    found = _pipelined(facts)
    if found:
        yield found


@rule(
    "MTP302",
    "MTP with pipeline parallelism on the V1 model runner",
    Severity.ERROR,
    effect="Only the V2 runner hands drafts between the stages; on V1 acceptance collapses.",
    cure="Remove VLLM_USE_V2_MODEL_RUNNER=0, use tensor parallelism, or do not draft.",
    thread="vllm-project/vllm#49355; vllm-project/vllm#46994",
    versions=vllm(since="0.32"),
)
def pipelined_on_v1(facts: Facts) -> Iterator[str]:
    """V2 is the default where there is Triton."""
    found = _pipelined(facts)
    if found and facts.v1_runner:
        yield f"{found}, on the V1 model runner"


@rule(
    "MTP303",
    "changing n with data parallelism",
    Severity.WARNING,
    effect=f"vLLM turns {DYNAMIC_N} off and drafts with the fixed n.",
    cure="Remove it; for n by load, write one variant for each n and let the router choose.",
    thread="vLLM 0.32.0, config/vllm.py",
    versions=vllm(since="0.24"),
    status=BY_DESIGN,
)
def dynamic_n_with_dp(facts: Facts) -> Iterator[str]:
    """Ranks could choose differently."""
    copies = facts.number("data_parallel_size", 1)
    if facts.dynamic_n and copies > 1:
        yield f"{DYNAMIC_N} with data_parallel_size {copies}"


@rule(
    "MTP304",
    "changing n on the V1 model runner",
    Severity.ERROR,
    effect="Full CUDA graphs are lost and throughput collapses where n changes (232 to 24-157 "
    "tokens/s at 8 streams); on a CPU the greedy text changes as well.",
    cure="Write one variant for each n and let the router choose.",
    thread="vllm-project/vllm#49548; vllm-project/vllm#48494",
    versions=vllm(since="0.24"),
)
def dynamic_n_on_v1(facts: Facts) -> Iterator[str]:
    """Data parallel engines ignore the setting anyway."""
    if facts.dynamic_n and facts.v1_runner and facts.number("data_parallel_size", 1) == 1:
        yield f"{DYNAMIC_N} on the V1 model runner"


@rule(
    "MTP305",
    "a GPTQ or AWQ head over several cards",
    Severity.WARNING,
    effect="The drafter's weights do not have the shape expected at tensor parallel 2 and more, "
    "and the engine does not start.",
    cure="Try it with one card first, or choose an FP8 or AutoRound export.",
    thread="vllm-project/vllm#52480",
    versions=vllm(since="0.17"),
)
def quantised_head_split(facts: Facts) -> Iterator[str]:
    """By the quantisation block, or by the repository's name where it was not read."""
    kinds = [kind for kind in ("gptq", "awq") if kind in (facts.method or facts.place.lower())]
    if facts.own_head and facts.tensor_parallel > 1 and kinds:
        yield f"{kinds[0].upper()} with tensor_parallel_size {facts.tensor_parallel} and method mtp"


@rule(
    "MTP306",
    "expandable segments over several cards",
    Severity.WARNING,
    effect="Capturing CUDA graphs is aborted: the fast all-reduce cannot share such memory.",
    cure="Set PYTORCH_CUDA_ALLOC_CONF to expandable_segments:False.",
    thread="syv-ai/HyperQwen#163",
    versions=vllm(since="0.17"),
)
def expandable_segments(facts: Facts) -> Iterator[str]:
    """As the environment of the engine sets it."""
    given = facts.env.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if facts.tensor_parallel > 1 and "expandable_segments:true" in given.lower():
        yield f"PYTORCH_CUDA_ALLOC_CONF is {given!r} with {facts.tensor_parallel} cards"


@rule(
    "MTP307",
    "MTP with asynchronous scheduling on a GDN model",
    Severity.WARNING,
    effect="The number of accepted drafts indexes a state without a bound: illegal memory accesses "
    "(Xid 13 or 31) after minutes of agent traffic, each killing the engine.",
    cure="Set async_scheduling: false under engine_args (--no-async-scheduling); a single stream "
    "hardly gets slower.",
    thread="vllm-project/vllm#40756; vllm-project/vllm#50021; noonghunna/club-3090#1052",
    # Scheduling and drafting overlap since 0.19; the index is still unbounded in 0.32.0
    # (third_party/flash_linear_attention/ops/fused_sigmoid_gating.py).
    versions=vllm(since="0.19"),
)
def async_index(facts: Facts) -> Iterator[str]:
    """Unless the installed vLLM is seen to be patched."""
    if facts.drafts_asynchronously and not facts.index_bounded:
        seen = facts.index_bounded is False
        text = "asynchronous scheduling is on"
        yield f"{text}; the installed vLLM's index is unbounded" if seen else text


@rule(
    "MTP310",
    "asynchronous scheduling with the patched index",
    Severity.NOTE,
    effect="With the index bounded, version 0.27.1 still crashed the same way under agent traffic, "
    "but only with asynchronous scheduling.",
    cure="Set async_scheduling: false under engine_args (--no-async-scheduling) if it crashes.",
    thread="vllm-project/vllm#50021",
    versions=vllm(since="0.19"),
)
def async_patched(facts: Facts) -> Iterator[str]:
    """The installed vLLM bounds the index."""
    if facts.drafts_asynchronously and facts.index_bounded:
        yield "asynchronous scheduling is on; the installed vLLM's index is bounded"


@rule(
    "MTP308",
    "strict JSON and tools on a mixture of experts with MTP",
    Severity.WARNING,
    effect="Of 24 strict JSON answers 20.3 were valid with MTP and 23.75 without; tool calls "
    "suffer the same way.",
    cure="Send such requests to a plain variant.",
    thread="vllm-project/vllm#44993; vllm-project/vllm#38106",
    versions=vllm(since="0.17"),
)
def structured_moe(facts: Facts) -> Iterator[str]:
    """A parser for tool calls says that tools are used."""
    if facts.mtp and facts.moe and facts.text("tool_call_parser"):
        yield f"tool_call_parser {facts.text('tool_call_parser')} on a drafting mixture of experts"


@rule(
    "MTP309",
    "structured output with MTP, before the fix",
    Severity.WARNING,
    effect="The grammar is ignored where reasoning ends inside the drafts, or rejects its end "
    "token and the request fails.",
    cure="Upgrade vLLM, or send structured output to a plain variant.",
    thread="vllm-project/vllm#44993; vllm-project/vllm#44297; vllm-project/vllm#46118",
    # Merged in July 2026; 0.26 is the first release certain to have both.
    versions=vllm(since="0.17", before="0.26"),
)
def grammar_boundary(facts: Facts) -> Iterator[str]:
    """A reasoning parser says that there is a boundary."""
    if facts.mtp and facts.text("reasoning_parser"):
        yield f"reasoning_parser {facts.text('reasoning_parser')} with method mtp"
