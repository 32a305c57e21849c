"""Rules about how a model is asked to draft: MTP101 to MTP119."""

from __future__ import annotations

from collections.abc import Iterator

from serving.checks.facts import Facts
from serving.checks.finding import BY_DESIGN, Severity, rule
from serving.checks.rules.head import ASSISTANTS
from serving.checks.versions import vllm

# In the order in which vLLM 0.32 asks (config/speculative.py).
OVERRIDES = ("eagle-", "eagle3", "dflash", "dspark")
STABLE_N = 4
# Attention heads that vLLM 0.32's CPU kernels take (v1/attention/backends/cpu_attn.py), without
# 32, which the backend lists but which failed here.
CPU_HEAD_DIMS = (64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CPU_GDN_MULTIPLE, CPU_GDN_LEAST = 32, 64
# Below this, n-gram drafting copied wrong arguments into tool calls.
NGRAM_SAFE_LOOKUP = 8


@rule(
    "MTP101",
    "a name in the path overrides the drafting method",
    Severity.ERROR,
    effect="vLLM takes the drafter for another kind by its name, silently, and stops with an error "
    "about something else, such as a missing vocab_size.",
    cure="Rename the folder, or link to it under another name.",
    thread="syv-ai/HyperQwen, gotcha 14; vLLM 0.32.0, config/speculative.py",
    versions=vllm(since="0.17"),
)
def method_overridden(facts: Facts) -> Iterator[str]:
    """Any part of the path counts; without a drafting checkpoint it is the model's own."""
    checkpoint = facts.checkpoint
    head = checkpoint is not None and checkpoint.config.mtp_layers > 0
    if not (facts.mtp or (head and not facts.args)):
        return
    drafter = facts.speculative.get("model")
    place = drafter if isinstance(drafter, str) else facts.place
    word = next((each for each in OVERRIDES if each in place.lower()), None)
    if word is not None:
        yield f"{place} contains {word!r}"


@rule(
    "MTP102",
    "an old name of the drafting method",
    Severity.WARNING,
    effect="vLLM warns and takes it for mtp; a later version may refuse it.",
    cure="Write `method: mtp`.",
    thread="vllm-project/vllm#25232",
    versions=vllm(since="0.11"),
    status=BY_DESIGN,
)
def method_deprecated(facts: Facts) -> Iterator[str]:
    """qwen3_next_mtp, qwen3_5_mtp, deepseek_mtp and so on."""
    if facts.mtp and facts.spec_method != "mtp":
        yield f"method {facts.spec_method!r}"


@rule(
    "MTP103",
    "more draft tokens than are stable",
    Severity.WARNING,
    effect="From 5 on, GDN models crashed under load with an illegal memory access that kills the "
    "engine.",
    cure=f"Lower num_speculative_tokens to {STABLE_N} or less; later drafts are rarely accepted.",
    thread="vllm-project/vllm#37035",
    versions=vllm(since="0.17"),
)
def too_many_drafts(facts: Facts) -> Iterator[str]:
    """The kernels concerned are CUDA's."""
    if facts.mtp and facts.hybrid and not facts.on_cpu and facts.draft_tokens > STABLE_N:
        yield f"num_speculative_tokens is {facts.draft_tokens}"


@rule(
    "MTP104",
    "n is no multiple of the MTP layers",
    Severity.ERROR,
    effect="The engine does not start: num_speculative_tokens must be divisible by n_predict.",
    cure="Choose a multiple of the number of MTP layers.",
    thread="vLLM 0.32.0, config/speculative.py",
    versions=vllm(since="0.17"),
    status=BY_DESIGN,
)
def n_not_divisible(facts: Facts) -> Iterator[str]:
    """Every layer drafts one token in turn."""
    layers = facts.architecture.mtp_layers if facts.architecture else 0
    n = facts.draft_tokens
    if facts.own_head and layers and n > layers and n % layers:
        yield f"num_speculative_tokens is {n} with {layers} MTP layers"


@rule(
    "MTP105",
    "Gemma 4 without its assistant",
    Severity.ERROR,
    effect="The engine does not start: the model has no MTP layer of its own.",
    cure="Name the assistant of the same size under speculative.model, such as "
    "google/gemma-4-31B-it-assistant.",
    thread="vllm-project/vllm#41745; vllm-project/vllm#42005",
    versions=vllm(),
    status=BY_DESIGN,
)
def assistant_missing(facts: Facts) -> Iterator[str]:
    """Its MTP head is a checkpoint of its own."""
    if facts.own_head and facts.model_type.startswith(ASSISTANTS):
        yield f"method mtp on {facts.place} ({facts.model_type}) without a drafting checkpoint"


@rule(
    "MTP106",
    "a text-only model with mrope_section",
    Severity.ERROR,
    effect="As soon as MTP drafts, positions in three rows go to a kernel for one: on a CPU it "
    "corrupts the heap.",
    cure="Remove mrope_section (and mrope_interleaved) from rope_parameters in config.json.",
    thread="seen here on vLLM 0.32.0, CPU (docs/checks.md)",
    versions=vllm(since="0.17"),
)
def mrope_in_text_model(facts: Facts) -> Iterator[str]:
    """Text-only by its type or its class; only where there is a head to draft."""
    checkpoint = facts.checkpoint
    if checkpoint is None or not (checkpoint.config.mtp_layers or facts.mtp):
        return
    config = checkpoint.config
    if config.text_only and "mrope_section" in config.rope:
        kind = config.model_type or ", ".join(config.architectures)
        yield f"config.json: {kind} has mrope_section in rope_parameters"


@rule(
    "MTP107",
    "head dimensions that the CPU kernels refuse",
    Severity.ERROR,
    effect="The engine stops at the first request, or while it starts.",
    cure="Serve it on a GPU, or choose a model with heads of 64, 128 or 256.",
    thread="vLLM 0.32.0, v1/attention/backends/cpu_attn.py; tried here",
    versions=vllm(since="0.32"),
    status=BY_DESIGN,
)
def cpu_head_dims(facts: Facts) -> Iterator[str]:
    """Attention heads from a list; GDN heads equal, and multiples of 32 from 64 on."""
    a = facts.architecture
    if not facts.on_cpu or a is None:
        return
    if a.head_dim not in CPU_HEAD_DIMS:
        yield f"attention heads of {a.head_dim}; {', '.join(map(str, CPU_HEAD_DIMS))} work"
    if a.gdn is None:
        return
    if a.gdn.key_dim != a.gdn.value_dim:
        yield f"GDN keys of {a.gdn.key_dim} and values of {a.gdn.value_dim}; they must be equal"
    elif a.gdn.key_dim < CPU_GDN_LEAST or a.gdn.key_dim % CPU_GDN_MULTIPLE:
        yield f"GDN heads of {a.gdn.key_dim}; multiples of 32 from 64 on work"


@rule(
    "MTP108",
    "n-gram drafting with short look-ups and tools",
    Severity.WARNING,
    effect="Arguments of earlier tool calls are copied into later ones.",
    cure=f"Set prompt_lookup_min to {NGRAM_SAFE_LOOKUP} or more.",
    thread="vllm-project/vllm#40875",
    versions=vllm(),
)
def ngram_with_tools(facts: Facts) -> Iterator[str]:
    """vLLM's own default is 5."""
    least = facts.speculative.get(
        "prompt_lookup_min", facts.speculative.get("prompt_lookup_max", 5)
    )
    short = type(least) is int and least < NGRAM_SAFE_LOOKUP
    if facts.spec_method in ("ngram", "ngram_gpu") and facts.text("tool_call_parser") and short:
        yield f"prompt_lookup_min is {least}, with a tool call parser"


@rule(
    "MTP109",
    "asynchronous scheduling with an unpadded drafter batch",
    Severity.ERROR,
    effect="The engine does not start.",
    cure="Remove async_scheduling, or disable_padded_drafter_batch.",
    thread="vLLM 0.32.0, config/vllm.py",
    versions=vllm(since="0.19"),
    status=BY_DESIGN,
)
def unpadded_and_async(facts: Facts) -> Iterator[str]:
    """Only where it is asked for: left out, vLLM turns asynchronous scheduling off."""
    unpadded = facts.speculative.get("disable_padded_drafter_batch") is True
    if unpadded and facts.args.get("async_scheduling") is True:
        yield "async_scheduling and disable_padded_drafter_batch are both on"
