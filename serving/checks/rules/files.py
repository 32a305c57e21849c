"""Rules about a checkpoint's files, whatever the engine: MTP001 to MTP009."""

from __future__ import annotations

from collections.abc import Iterator

from serving.checks.checkpoint import CONFIG, INDEX
from serving.checks.facts import Facts
from serving.checks.finding import BY_DESIGN, Severity, rule
from serving.checks.rules.wording import few

TOKENIZERS = frozenset({"tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json"})


@rule(
    "MTP001",
    "config.json is missing or unusable",
    Severity.ERROR,
    effect="The engine cannot tell what model it is, and does not start.",
    cure="Copy config.json from the model's page anew.",
    thread="transformers, AutoConfig.from_pretrained",
    status=BY_DESIGN,
)
def config_unusable(facts: Facts) -> Iterator[str]:
    """Of a folder of safetensors."""
    checkpoint = facts.checkpoint
    if checkpoint is not None and CONFIG in checkpoint.faults:
        yield f"{CONFIG} {checkpoint.faults[CONFIG]}"


@rule(
    "MTP002",
    "a weight file is cut off or damaged",
    Severity.ERROR,
    effect="Loading fails, after minutes of reading on a large model.",
    cure="Fetch the file again: `moe-serving pull` compares each with its checksum.",
    thread="huggingface/safetensors README, Format",
    status=BY_DESIGN,
)
def weights_damaged(facts: Facts) -> Iterator[str]:
    """By the header alone: it says where the last tensor ends."""
    for name, fault in sorted((facts.checkpoint.faults if facts.checkpoint else {}).items()):
        if name.endswith((".safetensors", ".gguf")):
            yield f"{name}: {fault}"


@rule(
    "MTP003",
    "the index and the weight files disagree",
    Severity.ERROR,
    effect="Loading fails, or leaves layers with whatever the memory held.",
    cure="Fetch the index and all its files from one revision.",
    thread="vllm-project/vllm#35548",
    status=BY_DESIGN,
)
def index_disagrees(facts: Facts) -> Iterator[str]:
    """Files it names that are not there, tensors that are elsewhere, missing or not listed."""
    checkpoint = facts.checkpoint
    if checkpoint is None:
        return
    if INDEX in checkpoint.faults:
        yield f"{INDEX} {checkpoint.faults[INDEX]}"
    if checkpoint.missing_files:
        yield f"{INDEX} names {few(checkpoint.missing_files)}, which the folder lacks"
    if checkpoint.index is None or not checkpoint.complete:
        return
    tensors = checkpoint.tensors
    lost = sorted(checkpoint.index.keys() - tensors.keys())
    if lost:
        yield f"{INDEX} lists {few(lost)}, which no file holds"
    extra = sorted(tensors.keys() - checkpoint.index.keys())
    if extra:
        yield f"the files hold {few(extra)}, which {INDEX} does not list"
    moved = sorted(
        name for name, file in checkpoint.index.items()
        if name in tensors and tensors[name].file != file
    )  # fmt: skip
    if moved:
        yield f"{few(moved)}: in another file than {INDEX} says"


@rule(
    "MTP004",
    "the tokenizer is missing",
    Severity.ERROR,
    effect="The engine starts with an empty vocabulary, or stops with an error that speaks of "
    "the reasoning parser.",
    cure="Copy tokenizer.json and tokenizer_config.json from the base model.",
    thread="syv-ai/HyperQwen, gotcha 32",
    status=BY_DESIGN,
)
def tokenizer_missing(facts: Facts) -> Iterator[str]:
    """A GGUF file carries its own."""
    checkpoint = facts.checkpoint
    if checkpoint is None:
        return
    if checkpoint.gguf is not None:
        if "tokenizer.ggml.tokens" not in checkpoint.gguf.metadata:
            yield "no tokenizer.ggml.tokens in the metadata"
    elif checkpoint.all_files and not (checkpoint.files & TOKENIZERS or "tokenizer" in facts.args):
        yield f"none of {', '.join(sorted(TOKENIZERS))} is there"


@rule(
    "MTP005",
    "the chat template is missing",
    Severity.WARNING,
    effect="Chat requests are refused, or phrased in a way the model was not trained on; "
    "completions work.",
    cure="Copy chat_template.jinja from the base model.",
    thread="transformers, chat templates",
    status=BY_DESIGN,
)
def template_missing(facts: Facts) -> Iterator[str]:
    """As a file of its own or within tokenizer_config.json."""
    checkpoint = facts.checkpoint
    if checkpoint is None or checkpoint.chat_template or not checkpoint.all_files:
        return
    if "chat_template" not in facts.args:
        yield "neither chat_template.jinja nor a chat_template in the tokenizer's configuration"


@rule(
    "MTP006",
    "the checkpoint cannot be read",
    Severity.ERROR,
    effect="The engine does not start.",
    cure="Correct the path, or copy the checkpoint there.",
    thread="docs/stack-file.md",
    status=BY_DESIGN,
)
def unreadable(facts: Facts) -> Iterator[str]:
    """Of a stack; a target that cannot be read is an error of the command itself."""
    if facts.unreadable:
        yield facts.unreadable
