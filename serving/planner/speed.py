"""How long a decode step takes, with and without drafts, and so tokens per second.

Owns the roofline: bytes and operations of a pass by part, fixed costs, and what drafting
adds. Every result is a prediction. Leaves the constants to `constants`, what is accepted
to `acceptance`, whether it fits to `memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serving.catalog.models import Architecture, ModelEntry
from serving.planner.acceptance import Acceptance
from serving.planner.constants import CONSTANTS, VECTOR_BATCH, Constants, EngineFamily
from serving.planner.errors import PlannerError
from serving.planner.machine import Machine
from serving.planner.memory import LOGIT_BYTES
from serving.planner.parameters import Part, PerPart, count_parameters
from serving.planner.precision import Precision

TRUNK: tuple[Part, ...] = ("attention", "gdn", "ffn", "shared")


@dataclass(frozen=True, slots=True)
class Target:
    """The model as it is served."""

    architecture: Architecture
    precision: Precision
    kv_dtype: str = "bfloat16"
    ssm_dtype: str | None = None
    drafter_bytes: float | None = None
    """Weights of a drafting checkpoint of its own; None where the MTP layer drafts."""

    @classmethod
    def of(cls, entry: ModelEntry, precision: Precision) -> Target:
        """A model of the catalogue with these bits."""
        own = entry.draft and entry.draft.size_gb
        return cls(entry.architecture, precision, drafter_bytes=own * 1e9 if own else None)

    @property
    def drafts(self) -> bool:
        """Whether anything is known that could draft."""
        return self.architecture.mtp_layers > 0 or self.drafter_bytes is not None


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything a prediction depends on but the load."""

    target: Target
    machine: Machine
    family: EngineFamily
    constants: Constants = CONSTANTS

    @property
    def bandwidth(self) -> float:
        """Bytes/s that a step reaches, of all cards together."""
        return self.machine.bandwidth * self.constants.bandwidth_fraction


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one decode step, by what they are spent on."""

    weights: float
    """Reading weights and computing with them, in the trunk and the output head."""
    state: float
    """Reading and writing GDN states."""
    kv: float
    """Reading the KV cache."""
    logits: float
    fixed: float
    """Scheduling, launching, sampling."""
    expert_layers: float
    """Routing and small expert kernels."""
    allreduce: float
    drafting: float
    """All draft passes together; 0 without drafts."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        parts = (self.weights, self.state, self.kv, self.logits, self.fixed)
        return sum(parts) + self.expert_layers + self.allreduce + self.drafting


def unique_experts(experts: int, per_token: int, tokens: float) -> float:
    """Experts that `tokens` tokens use together if each chooses independently.

    N(t) = E (1 - (1 - k/E)^t) (MoESD, arXiv 2505.19645).
    """
    return float(experts * (1 - (1 - per_token / experts) ** tokens))


def step_time(
    setup: Setup, draft_tokens: int = 0, *, sequences: int = 1, context: int = 0
) -> StepTime:
    """One step of `sequences` requests of `context` tokens each, verifying n drafts each.

    T = n + 1 tokens per request go through the trunk; n passes through the MTP layer and
    the output head made the drafts. Raises PlannerError where the model cannot draft.
    """
    if draft_tokens and not setup.target.drafts:
        raise PlannerError(
            "draft_tokens: nothing is known of this model's drafter; ask for 0 draft tokens"
        )
    per_request = draft_tokens + 1
    tokens = sequences * per_request
    correlated = sequences * (1 + setup.constants.routing_correlation * draft_tokens)
    a = setup.target.architecture
    bandwidth = setup.bandwidth
    # Each draft leaves a state to fall back to: one read, T writes.
    page = a.gdn_page_bytes(draft_tokens, ssm_dtype=setup.target.ssm_dtype)
    state = sequences * (1 + per_request) * page * a.layers.gdn
    speculation = setup.family.speculation_s if draft_tokens else 0.0
    return StepTime(
        weights=_matrices(setup, [*_trunk(setup, correlated), _head(setup)], tokens),
        state=state / bandwidth,
        kv=sequences * _kv_bytes(setup.target, context) / bandwidth,
        logits=tokens * a.vocab_size * LOGIT_BYTES / bandwidth,
        fixed=setup.family.step_s + speculation,
        expert_layers=_expert_layers(setup, a.layers.total, tokens),
        allreduce=_allreduce(setup, a.layers.total),
        drafting=draft_tokens * draft_time(setup, sequences=sequences, context=context)
        if draft_tokens
        else 0.0,
    )


def draft_time(setup: Setup, *, sequences: int = 1, context: int = 0) -> float:
    """Seconds to draft one token for each of `sequences` requests.

    The MTP layer and the output head are read once more for every drafted token.
    """
    target = setup.target
    per_layer = target.architecture.kv_bytes_per_token_per_layer(target.kv_dtype)
    layers = target.architecture.mtp_layers
    return (
        _matrices(setup, _drafter(setup, sequences), sequences)
        + sequences * context * per_layer * layers / setup.bandwidth
        + setup.family.draft_s
        + _expert_layers(setup, layers, sequences)
        + _allreduce(setup, max(1, layers))
    )


@dataclass(frozen=True, slots=True)
class _Product:
    """One group of matrices in a pass: bytes read, operations per token, bits per weight."""

    read: float
    per_token: float
    bits: float


def _trunk(setup: Setup, correlated: float) -> list[_Product]:
    """The decoder layers; `correlated` counts tokens as far as they choose other experts."""
    parameters, stored = _counted(setup.target)
    bits = setup.target.precision.bits
    products = [
        _Product(getattr(stored, part), 2 * getattr(parameters, part), bits[part]) for part in TRUNK
    ]
    experts = setup.target.architecture.experts
    if experts is not None:
        used = unique_experts(experts.count, experts.per_token, correlated) / experts.count
        active = experts.per_token / experts.count
        products.append(
            _Product(stored.experts * used, 2 * parameters.experts * active, bits["experts"])
        )
    return products


def _head(setup: Setup) -> _Product:
    """The output head, which is the embedding table where the two are tied."""
    parameters, stored = _counted(setup.target)
    tied = setup.target.architecture.tie_embeddings
    part: Part = "embedding" if tied else "lm_head"
    return _Product(
        getattr(stored, part), 2 * getattr(parameters, part), setup.target.precision.bits[part]
    )


def _drafter(setup: Setup, sequences: int) -> list[_Product]:
    """What a draft pass reads: the MTP layer with its experts and the output head."""
    target = setup.target
    if target.architecture.mtp_layers == 0 and target.drafter_bytes is not None:
        # A drafter of its own has an output head of its own, and is in bf16.
        return [_Product(target.drafter_bytes, target.drafter_bytes, 16)]
    parameters, stored = _counted(target)
    bits = target.precision.bits
    products = [_Product(stored.mtp, 2 * parameters.mtp, bits["mtp"]), _head(setup)]
    experts = target.architecture.experts
    if experts is not None:
        used = unique_experts(experts.count, experts.per_token, sequences) / experts.count
        active = 2 * parameters.mtp_experts * experts.per_token / experts.count
        products.append(_Product(stored.mtp_experts * used, active, bits["mtp_experts"]))
    return products


def _counted(target: Target) -> tuple[PerPart, PerPart]:
    """Parameters and bytes by part."""
    parameters = count_parameters(target.architecture)
    return parameters, target.precision.bytes_of(parameters)


def _matrices(setup: Setup, products: Sequence[_Product], tokens: int) -> float:
    """Seconds of the matrix products of a pass of `tokens` tokens.

    On tensor cores each group takes the longer of reading and computing. llama.cpp's
    kernels for small batches compute on the vector units and hide none of it; larger
    batches take at least as long as the largest small one.
    """
    machine, family = setup.machine, setup.family
    overlapped = sum(
        max(each.read / setup.bandwidth, _tensor_time(setup, each, tokens)) for each in products
    )
    if family.vector_fraction is None or machine.vector_flops is None:
        return overlapped
    small = min(tokens, VECTOR_BATCH)
    operations = sum(each.per_token * small for each in products)
    reading = sum(each.read for each in products) / setup.bandwidth
    return max(overlapped, reading + operations / (machine.vector_flops * family.vector_fraction))


def _tensor_time(setup: Setup, product: _Product, tokens: int) -> float:
    peak = setup.machine.tensor_peak(product.bits)
    if peak is None:
        return 0.0
    return product.per_token * tokens / (peak * setup.constants.tensor_fraction)


def _kv_bytes(target: Target, context: int) -> int:
    """Bytes of KV cache that a step reads for one request of `context` tokens."""
    a = target.architecture
    read = context * a.kv_bytes_per_token(target.kv_dtype)
    if a.sliding is not None:
        per_value = a.kv_bytes_per_token_per_layer(target.kv_dtype) // (a.kv_heads * a.head_dim)
        window = min(context, a.sliding.window)
        per_layer = window * per_value * a.sliding.kv_heads * a.sliding.head_dim
        read += per_layer * a.layers.sliding_attention
    return read


def _expert_layers(setup: Setup, layers: int, tokens: int) -> float:
    if setup.target.architecture.experts is None or not setup.family.expert_layers:
        return 0.0
    further = min(tokens, VECTOR_BATCH) - 1
    per_layer = setup.constants.expert_layer_s + setup.family.expert_token_s * further
    return layers * per_layer


def _allreduce(setup: Setup, layers: int) -> float:
    """Two all-reduces per layer, after attention and after the feed-forward part."""
    return 2 * layers * setup.constants.allreduce_s if setup.machine.cards > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Decode:
    """Predicted decode speed at one load."""

    draft_tokens: int
    concurrency: int
    tokens_per_step: float
    """Expected tokens that one request gains per step, E(n)."""
    step: StepTime
    plain_step_s: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of all requests together."""
        return self.concurrency * self.tokens_per_step / self.step.total

    @property
    def per_request(self) -> float:
        """Output tokens per second of one request."""
        return self.tokens_per_step / self.step.total

    @property
    def speedup(self) -> float:
        """Over decoding without drafts at the same load, E(n) T(0) / T(n)."""
        return self.tokens_per_step * self.plain_step_s / self.step.total


def decode(
    setup: Setup,
    draft_tokens: int,
    acceptance: Acceptance,
    *,
    concurrency: int = 1,
    context: int = 0,
) -> Decode:
    """Predicted decode speed with `draft_tokens` drafts and `concurrency` running requests.

    `context` is the tokens each request has behind it. Raises PlannerError.
    """
    step = step_time(setup, draft_tokens, sequences=concurrency, context=context)
    plain = step_time(setup, 0, sequences=concurrency, context=context) if draft_tokens else step
    return Decode(
        draft_tokens=draft_tokens,
        concurrency=concurrency,
        tokens_per_step=acceptance.expected_length(draft_tokens),
        step=step,
        plain_step_s=plain.total,
    )


def first_token_time(setup: Setup, prompt_tokens: int, *, drafting: bool) -> float | None:
    """Predicted seconds from a request's start to its first token, with an idle engine.

    The longer of computing the prompt and reading all weights once, and one step's fixed
    cost; while drafting longer by the prefill tax. None where the machine's arithmetic is
    not known.
    """
    if setup.machine.tensor_flops is None:
        return None
    a, share = setup.target.architecture, setup.constants.prefill_fraction
    products = _trunk(setup, prompt_tokens)
    computing = 0.0
    for each in products:
        peak = setup.machine.tensor_peak(each.bits)
        computing += each.per_token * prompt_tokens / ((peak or 1.0) * share)
    # Scores and weighted values, each 2 operations, of half of all pairs.
    pairs = 2 * prompt_tokens**2 * a.heads * a.head_dim * a.layers.full_attention
    computing += pairs / (setup.machine.tensor_flops * share)
    reading = sum(each.read for each in products) / setup.bandwidth
    seconds = max(computing, reading) + setup.family.step_s
    return seconds * (1 + setup.constants.prefill_tax) if drafting else seconds
