"""Rules about the MTP head inside a checkpoint: MTP010 to MTP029."""

from __future__ import annotations

from collections.abc import Iterator

from serving.checks.facts import Facts
from serving.checks.finding import BY_DESIGN, Severity, rule
from serving.checks.head import PREFIX, Part, Shape, Stored, layout, stored_modules
from serving.checks.quantisation import Quantisation
from serving.checks.rules.wording import few
from serving.checks.versions import vllm

# Model types whose MTP head is a checkpoint of its own.
ASSISTANTS = ("gemma4",)
FLOOR = "0.17"


def _parts(facts: Facts) -> list[tuple[Part, Stored | None]]:
    """Each part of the head with how it is stored; [] where nothing of a head is to be compared."""
    checkpoint = facts.checkpoint
    if checkpoint is None or not checkpoint.complete:
        return []
    stored = stored_modules(checkpoint.tensors)
    if not stored:
        return []
    return [(part, stored.get(part.name)) for part in layout(checkpoint.config, stored)]


@rule(
    "MTP010",
    "the MTP head was dropped",
    Severity.ERROR,
    effect="A quantised checkpoint drafts with weights that were never loaded and accepts nothing, "
    "without an error; any other does not start with MTP.",
    cure="Choose an export that kept the head, put the base model's mtp.* tensors back, or serve "
    "it without drafting and set mtp_num_hidden_layers to 0.",
    thread="vllm-project/vllm#35548",
    versions=vllm(since=FLOOR),
)
def head_dropped(facts: Facts) -> Iterator[str]:
    """config.json promises what no file holds."""
    checkpoint = facts.checkpoint
    if checkpoint is None or not checkpoint.complete or not checkpoint.config.mtp_layers:
        return
    if not any(name.startswith(PREFIX) for name in checkpoint.tensors):
        promised, unlisted = checkpoint.config.mtp_layers, checkpoint.unlisted_files
        yield (
            f"mtp_num_hidden_layers is {promised}, but none of the {len(checkpoint.tensors)} "
            f"tensors is named {PREFIX}*"
            + (f"; {few(unlisted)} is not named by the index" if unlisted else "")
        )


@rule(
    "MTP011",
    "the MTP head is incomplete",
    Severity.ERROR,
    effect="What is missing stays uninitialised: acceptance falls to nothing without an error, or "
    "the engine does not start with MTP.",
    cure="Choose a complete export, or copy the missing tensors from the base model.",
    thread="modelscope/ms-swift#9802; vllm-project/vllm#35548",
    versions=vllm(since=FLOOR),
)
def head_incomplete(facts: Facts) -> Iterator[str]:
    """15 tensors for a dense model, 19 with experts saved together, else three per expert."""
    parts = _parts(facts)
    missing = [part.name for part, stored in parts if stored is None]
    if missing:
        yield f"{len(missing)} of {len(parts)} parts are missing: {few(missing)}"


@rule(
    "MTP012",
    "the MTP head has the wrong shape",
    Severity.ERROR,
    effect="Loading the drafter fails on a shape that does not match.",
    cure="Take the head of the same model and size; a head of another model cannot draft for it.",
    thread="vllm-project/vllm#44333",
    versions=vllm(since=FLOOR),
    status=BY_DESIGN,
)
def head_misshapen(facts: Facts) -> Iterator[str]:
    """Of weights that are stored as they are; packed ones have shapes of their own."""
    wrong = [
        f"{part.name} is {list(stored.tensor.shape)} instead of {_shown(part.shape)}"
        for part, stored in _parts(facts)
        if stored is not None and not stored.packed and not _fits(part.shape, stored)
    ]
    if wrong:
        yield few(wrong)


def _fits(shape: Shape, stored: Stored) -> bool:
    found = stored.tensor.shape
    if stored.tensor.dtype == "U8":  # two 4-bit values a byte
        return True
    return len(found) == len(shape) and all(
        want is None or want == got for want, got in zip(shape, found, strict=True)
    )


def _shown(shape: Shape) -> str:
    return f"[{', '.join('?' if each is None else str(each) for each in shape)}]"


@rule(
    "MTP020",
    "the head is not quantised, but not exempt either",
    Severity.ERROR,
    effect="vLLM builds the head for quantised weights and is given plain ones: a shape mismatch "
    "at loading, or acceptance 0 (FP8 copies them without their scales).",
    cure="Add these modules to the list of exceptions in the quantisation block: `ignore` "
    "(compressed-tensors, modelopt), modules_to_not_convert (AWQ, FP8), `-:.*mtp.*` under dynamic "
    "(GPTQ), extra_config (AutoRound).",
    thread="vllm-project/vllm#44333; vllm-project/vllm#35031",
    versions=vllm(since=FLOOR),
)
def head_not_exempt(facts: Facts) -> Iterator[str]:
    """Plain in the file, quantised by the block."""
    yield from _disagreement(facts, expected=True, text="plain in the file, quantised by")


@rule(
    "MTP021",
    "the head is quantised, but exempt",
    Severity.ERROR,
    effect="vLLM builds the head for plain weights and is given quantised ones: an error at "
    "loading, or acceptance 0.",
    cure="Take these modules off the list of exceptions, or export them unquantised.",
    thread="vllm-project/vllm#38832; vllm-project/vllm#44333",
    versions=vllm(since=FLOOR),
)
def head_exempt(facts: Facts) -> Iterator[str]:
    """Quantised in the file, plain by the block."""
    yield from _disagreement(facts, expected=False, text="quantised in the file, plain by")


def _disagreement(facts: Facts, *, expected: bool, text: str) -> Iterator[str]:
    checkpoint = facts.checkpoint
    if checkpoint is None:
        return
    block = checkpoint.quantisation
    names = [
        part.name
        for part, stored in _parts(facts)
        if part.quantisable
        and stored is not None
        and stored.quantised is not expected
        and _expected(block, part.name) is expected
    ]
    if names:
        by = block.method or "config.json, which has no quantisation block"
        yield f"{text} {by}: {few(names)}"


def _expected(block: Quantisation, name: str) -> bool | None:
    """What vLLM builds; experts saved together may be exempt under the names of single ones."""
    stem, experts, _ = name.partition(".experts.")
    names = [name]
    if experts:
        names += [f"{stem}.experts", f"{stem}.experts.0.gate_proj"]
    answers = [block.expects_quantised(each) for each in names]
    return False if False in answers else answers[0]


@rule(
    "MTP022",
    "mtp.fc is quantised",
    Severity.WARNING,
    effect="Exports of one model accepted 0 % with mtp.fc quantised and 80 % with it in bf16.",
    cure="Prefer an export that keeps mtp.fc in bf16, and measure the acceptance before relying on "
    "it.",
    thread="Tess NVFP4 and W4A16 model pages; vllm-project/vllm#38832",
    versions=vllm(since=FLOOR),
)
def fc_quantised(facts: Facts) -> Iterator[str]:
    """The layer that joins the embedding and the hidden state."""
    for part, stored in _parts(facts):
        if part.name == "mtp.fc" and stored is not None and stored.quantised:
            yield f"mtp.fc is stored as {stored.tensor.dtype}"


@rule(
    "MTP023",
    "mtp.fc of a modelopt NVFP4 export is not exempt",
    Severity.ERROR,
    effect="AssertionError while the drafter loads: vLLM expects mtp.fc packed, the file has bf16.",
    cure="Upgrade vLLM, or add mtp.fc to exclude_modules.",
    thread="vllm-project/vllm#38832",
    versions=vllm(since=FLOOR, before="0.20"),
)
def fc_not_exempt(facts: Facts) -> Iterator[str]:
    """Newer versions take mtp.fc of such exports as plain whatever the list says."""
    checkpoint = facts.checkpoint
    if checkpoint is None or not checkpoint.quantisation.method.startswith("modelopt"):
        return
    block = checkpoint.quantisation
    for part, stored in _parts(facts):
        plain = part.name == "mtp.fc" and stored is not None and not stored.quantised
        if plain and block.format == "nvfp4" and not block.exempts("mtp.fc"):
            yield "mtp.fc is in bf16 and not among the modules that are left out"


@rule(
    "MTP024",
    "drafting is asked for, but there is no head",
    Severity.ERROR,
    effect="The engine does not start, or drafts with nothing.",
    cure="Choose a checkpoint with a head, name a drafting checkpoint under speculative.model, or "
    "drop the block.",
    thread="vllm-project/vllm#35548",
    versions=vllm(),
    status=BY_DESIGN,
)
def no_head(facts: Facts) -> Iterator[str]:
    """By config.json where it was read, else by the catalogue."""
    if not facts.own_head or facts.model_type.startswith(ASSISTANTS):
        return
    checkpoint = facts.checkpoint
    if checkpoint is not None and checkpoint.complete:
        head = any(name.startswith(PREFIX) for name in checkpoint.tensors)
        if not checkpoint.config.mtp_layers and not head:
            yield "config.json has no mtp_num_hidden_layers, and no tensor is named mtp.*"
    elif facts.claimed_head is False:
        yield f"the catalogue says that {facts.place} holds no MTP head (the files were not read)"


@rule(
    "MTP025",
    "nobody has looked for the head",
    Severity.WARNING,
    effect="Exports often drop the head, and vLLM then accepts nothing, without an error.",
    cure="Run `moe-serving check` on the repository, or `moe-serving pull` and check again.",
    thread="vllm-project/vllm#35548",
    versions=vllm(),
    status=BY_DESIGN,
)
def head_unknown(facts: Facts) -> Iterator[str]:
    """Nothing on this machine, and the catalogue does not know."""
    if facts.own_head and facts.checkpoint is None and facts.claimed_head is None:
        yield f"{facts.place} is not on this machine, and nobody has looked into it"


@rule(
    "MTP026",
    "the head is taken from the catalogue",
    Severity.NOTE,
    effect="The files themselves were not read; a revision of them may differ.",
    cure="Run `moe-serving check` on the repository, or `moe-serving pull` and check again.",
    thread="docs/catalogue.md",
    versions=vllm(),
    status=BY_DESIGN,
)
def head_unverified(facts: Facts) -> Iterator[str]:
    """Nothing on this machine, but the catalogue says yes."""
    if facts.own_head and facts.checkpoint is None and facts.claimed_head:
        yield f"{facts.place} is not on this machine; the catalogue says that it holds the head"
