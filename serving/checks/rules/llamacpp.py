"""Rules about GGUF files and llama.cpp: MTP701 to MTP719."""

from __future__ import annotations

from collections.abc import Iterator

from serving.checks.facts import Facts
from serving.checks.finding import BY_DESIGN, Severity, rule
from serving.checks.versions import ANY, llamacpp

FIRST_MTP_BUILD = 9180
SLOTS_WORTH = 3
HEAD_KEY = "nextn_predict_layers"


def _spec_types(facts: Facts) -> list[str]:
    return [each.strip() for each in facts.text("spec_type").split(",") if each.strip()]


@rule(
    "MTP701",
    "--spec-type mtp",
    Severity.ERROR,
    effect='llama-server stops with "unknown speculative type: mtp"; it was the name before MTP '
    "was merged.",
    cure="Write --spec-type draft-mtp.",
    thread="ggml-org/llama.cpp#22673; tried here on b11434",
    versions=llamacpp(since=FIRST_MTP_BUILD),
    status=BY_DESIGN,
)
def old_type(facts: Facts) -> Iterator[str]:
    """Alone or in a list."""
    if "mtp" in _spec_types(facts):
        yield f"--spec-type {facts.text('spec_type')}"


@rule(
    "MTP702",
    "a build of llama.cpp before MTP",
    Severity.ERROR,
    effect="The type is refused, or ignored in silence, and nothing drafts.",
    cure=f"Take build b{FIRST_MTP_BUILD} or newer.",
    thread="ggml-org/llama.cpp#22673",
    versions=llamacpp(before=FIRST_MTP_BUILD),
    status=BY_DESIGN,
)
def build_before_mtp(facts: Facts) -> Iterator[str]:
    """Under either name."""
    if {"mtp", "draft-mtp"}.intersection(_spec_types(facts)):
        yield f"--spec-type {facts.text('spec_type')} with b{facts.version}"


@rule(
    "MTP703",
    "drafting is asked for, but the GGUF file holds no head",
    Severity.ERROR,
    effect="llama-server stops, or serves without drafting.",
    cure="Choose a conversion that kept the MTP layer (often named -MTP-GGUF), or give the head's "
    "own file with --spec-draft-model.",
    thread="ggml-org/llama.cpp#22673",
    versions=llamacpp(),
    status=BY_DESIGN,
)
def gguf_without_head(facts: Facts) -> Iterator[str]:
    """nextn_predict_layers is missing or 0, and no drafting file is named."""
    gguf = facts.checkpoint.gguf if facts.checkpoint else None
    asked = {"mtp", "draft-mtp"}.intersection(_spec_types(facts))
    if gguf and asked and not gguf.count(HEAD_KEY) and not facts.args.get("spec_draft_model"):
        yield f"{gguf.architecture or 'the file'} has no {HEAD_KEY} in its metadata"


@rule(
    "MTP704",
    "the GGUF file holds no head",
    Severity.NOTE,
    effect="It serves plain decoding; --spec-type draft-mtp has nothing to draft with.",
    cure="For MTP choose a conversion that kept the layer, often named -MTP-GGUF.",
    thread="ggml-org/llama.cpp#22673",
    versions=llamacpp(),
    status=BY_DESIGN,
)
def gguf_plain(facts: Facts) -> Iterator[str]:
    """Where nothing was asked for."""
    gguf = facts.checkpoint.gguf if facts.checkpoint else None
    if gguf and not facts.args and not gguf.count(HEAD_KEY):
        yield f"{gguf.architecture or 'the file'} has no {HEAD_KEY} in its metadata"


@rule(
    "MTP705",
    "the GGUF file promises a head that is not in it",
    Severity.ERROR,
    effect="Loading fails on a missing tensor.",
    cure="Convert the checkpoint again from one that kept its mtp.* tensors.",
    thread="ggml-org/llama.cpp#22673",
    versions=ANY,
    status=BY_DESIGN,
)
def gguf_head_dropped(facts: Facts) -> Iterator[str]:
    """The head's tensors are named blk.N.nextn.*."""
    checkpoint = facts.checkpoint
    if checkpoint is None or checkpoint.gguf is None or not checkpoint.complete:
        return
    layers = checkpoint.gguf.count(HEAD_KEY)
    if layers and not any(".nextn." in name for name in checkpoint.gguf.tensors):
        yield f"{HEAD_KEY} is {layers}, but no tensor is named blk.*.nextn.*"


@rule(
    "MTP706",
    "many slots with MTP",
    Severity.WARNING,
    effect="From 4 slots on plain decoding is about as fast, from 8 on faster; builds of May 2026 "
    "mixed the slots' hidden states.",
    cure=f"Set --parallel to {SLOTS_WORTH} or less, or do not draft.",
    thread="ggml-org/llama.cpp#23269; sudoingX/qwen38-mtp",
    versions=llamacpp(since=FIRST_MTP_BUILD),
)
def many_slots(facts: Facts) -> Iterator[str]:
    """--parallel counts them."""
    slots = facts.number("parallel", 1)
    if slots > SLOTS_WORTH and "draft-mtp" in _spec_types(facts):
        yield f"--parallel {slots} with --spec-type draft-mtp"
