"""What one engine keeps in the memory of each of its cards, in bytes.

Owns vLLM 0.32's arithmetic of weights, GDN states, hybrid blocks and KV cache, and
whether it all fits. States, pages and blocks are exact; activations, CUDA graphs
and the runtime are estimates, and named so. Leaves speed to `speed`, and which
settings to choose to `recommend`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from serving.catalog.models import Architecture
from serving.planner.errors import PlannerError
from serving.planner.parameters import PerPart, count_parameters
from serving.planner.precision import Precision

GIB = 1024**3
# vLLM's attention backends take KV blocks in multiples of this many tokens.
KERNEL_BLOCK_TOKENS = 16
# Estimates. The graphs of a 27B model with MTP took about this much (syv-ai/HyperQwen, gotcha 15);
# the CUDA context and the libraries' handles are about half a GiB (assumed, not measured here).
CUDA_GRAPH_BYTES = int(1.2 * GIB)
RUNTIME_BYTES = GIB // 2
# bf16 logits, their float32 copy and the probabilities of one row.
LOGIT_BYTES = 2 + 4 + 4
TABLE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Engine:
    """What the memory of an engine depends on; sizes are for the whole engine."""

    architecture: Architecture
    precision: Precision
    draft_tokens: int = 0
    context: int = 32_768
    """Longest prompt plus answer, tokens (max_model_len)."""
    concurrency: int = 4
    """Requests decoded at the same time (max_num_seqs)."""
    tensor_parallel: int = 1
    kv_dtype: str = "bfloat16"
    ssm_dtype: str | None = None
    """None: what the checkpoint asks for."""
    prefix_caching: bool = False
    vision: bool = False
    """Whether the vision tower is loaded (images are served)."""
    batched_tokens: int = 2_048
    """Tokens of the largest prefill step (max_num_batched_tokens)."""
    cuda: bool = True

    def __post_init__(self) -> None:
        for field in ("context", "concurrency", "tensor_parallel", "batched_tokens"):
            if getattr(self, field) < 1:
                raise PlannerError(f"{field}: found {getattr(self, field)}; give 1 or more")
        if self.draft_tokens < 0:
            raise PlannerError(f"draft_tokens: found {self.draft_tokens}; give 0 or more")
        if self.architecture.layers.full_attention == 0:
            raise PlannerError("a model without full attention layers is not planned for")
        _check_split(self.architecture, self.tensor_parallel)


def weights(
    architecture: Architecture,
    precision: Precision,
    *,
    draft_tokens: int = 0,
    vision: bool = False,
    tensor_parallel: int = 1,
) -> PerPart:
    """Bytes of weights on one card, by part.

    vLLM loads the MTP layer only where drafts are asked for, and the vision tower
    only where images are served (--language-model-only leaves it out).
    """
    counted = precision.bytes_of(count_parameters(architecture))
    if not draft_tokens:
        counted = replace(counted, mtp=0, mtp_experts=0)
    if not vision:
        counted = replace(counted, vision=0)
    split = {part: math.ceil(each / tensor_parallel) for part, each in counted.by_part().items()}
    return PerPart(**split)


def load_transient_bytes(
    architecture: Architecture, draft_tokens: int, *, tensor_parallel: int = 1
) -> int:
    """Bytes that loading needs on top for a moment.

    The drafter loads an embedding and an output table of its own, in bf16, before it
    shares the target's (vLLM issue 53887, still so in 0.32).
    """
    if draft_tokens == 0 or architecture.mtp_layers == 0:
        return 0
    table = architecture.vocab_size * architecture.hidden_size * TABLE_BYTES
    return math.ceil(2 * table / tensor_parallel)


def gdn_states_per_request(draft_tokens: int, *, prefix_caching: bool = False) -> int:
    """GDN states a running request holds in each layer: 1 + k, with prefix caching 2 + k.

    One to fall back to for each of k drafts, and in Mamba cache mode `align` a
    checkpoint of the prefill (vLLM 0.32.0, v1/kv_cache_interface.py).
    """
    return draft_tokens + (2 if prefix_caching else 1)


def hybrid_block_tokens(
    architecture: Architecture,
    draft_tokens: int = 0,
    *,
    kv_dtype: str = "bfloat16",
    ssm_dtype: str | None = None,
    tensor_parallel: int = 1,
) -> int:
    """Tokens of one KV cache block: as many as make its page at least a GDN state's.

    16 x ceil(page / (16 x bytes per token and attention layer)) (vLLM 0.32.0,
    platforms/interface.py); 16 without GDN layers.
    """
    page = architecture.gdn_page_bytes(
        draft_tokens, ssm_dtype=ssm_dtype, tensor_parallel=tensor_parallel
    )
    per_token = architecture.kv_bytes_per_token_per_layer(kv_dtype, tensor_parallel=tensor_parallel)
    return KERNEL_BLOCK_TOKENS * max(1, math.ceil(page / (KERNEL_BLOCK_TOKENS * per_token)))


def cached_prefix_tokens(prefix_tokens: int, block_tokens: int, *, drafting: bool) -> int:
    """Tokens that a later request finds cached of an earlier one of `prefix_tokens`.

    Whole blocks only; with drafting the last one is given up (syv-ai/HyperQwen,
    gotcha 39, measured).
    """
    blocks = prefix_tokens // block_tokens - (1 if drafting else 0)
    return max(0, blocks) * block_tokens


def shortest_prefix_hit(block_tokens: int, *, drafting: bool) -> int:
    """Tokens two requests must share before anything is found in the prefix cache."""
    return block_tokens * (2 if drafting else 1)


@dataclass(frozen=True, slots=True)
class Cache:
    """How vLLM cuts KV cache and GDN states into blocks of one size on one card."""

    block_tokens: int
    """Tokens of one block of a group of attention layers."""
    block_bytes: int
    """Bytes of one block: a page for each layer of a group, the largest group counting."""
    fixed_blocks: int
    """Blocks a request holds whatever its length: GDN states, or full sliding windows."""
    attention_groups: int

    def blocks(self, context: int) -> int:
        """Blocks that one request of `context` tokens holds."""
        return self.attention_groups * math.ceil(context / self.block_tokens) + self.fixed_blocks

    def context(self, blocks: int) -> int:
        """The longest request, in tokens, that `blocks` blocks hold; 0 where none does."""
        return max(0, (blocks - self.fixed_blocks) // self.attention_groups) * self.block_tokens


def cache_of(engine: Engine) -> Cache:
    """The engine's cache on one card.

    Layers of a kind are put into groups of one size, that of the kind with the fewest
    (of that with the most, if these are less than half as many again), and each group has
    a block table of its own (vLLM 0.32.0, v1/core/kv_cache_utils.py). The MTP layer is one
    more attention layer.
    """
    a, k, tp = engine.architecture, engine.draft_tokens, engine.tensor_parallel
    tokens = hybrid_block_tokens(
        a, k, kv_dtype=engine.kv_dtype, ssm_dtype=engine.ssm_dtype, tensor_parallel=tp
    )
    per_token = a.kv_bytes_per_token_per_layer(engine.kv_dtype, tensor_parallel=tp)
    attention = a.layers.full_attention + (a.mtp_layers if k else 0)
    if a.gdn is None:
        block = tokens * per_token * attention
        return Cache(tokens, block, math.ceil(_sliding_bytes(engine) / block), 1)
    fewest, most = sorted((attention, a.layers.gdn))
    group = most if most < 1.5 * fewest else fewest
    states = gdn_states_per_request(k, prefix_caching=engine.prefix_caching)
    return Cache(
        block_tokens=tokens,
        block_bytes=tokens * per_token * group,
        fixed_blocks=math.ceil(a.layers.gdn / group) * states,
        attention_groups=math.ceil(attention / group),
    )


def _sliding_bytes(engine: Engine) -> int:
    """Bytes that one request's full windows take; 0 without sliding layers."""
    sliding = engine.architecture.sliding
    if sliding is None:
        return 0
    full = engine.architecture
    per_head = full.kv_bytes_per_token_per_layer(engine.kv_dtype) // (full.kv_heads * full.head_dim)
    heads = max(1, sliding.kv_heads // engine.tensor_parallel)
    per_layer = per_head * heads * sliding.head_dim * sliding.window
    return per_layer * full.layers.sliding_attention


def activation_bytes(engine: Engine) -> int:
    """An estimate of the largest prefill step's intermediate values, on one card.

    The widest layer's inputs and outputs for every token of the step, and the logits of
    every position that is sampled or verified.
    """
    a, tp = engine.architecture, engine.tensor_parallel
    attention = a.heads * a.head_dim * (3 if a.attention_gate else 2) + 2 * a.kv_heads * a.head_dim
    gdn = 0
    if a.gdn is not None:
        values = a.gdn.value_heads * a.gdn.value_dim
        gdn = 2 * a.gdn.key_heads * a.gdn.key_dim + 3 * values
    mlp = 3 * (a.ffn_size or 0)
    if a.experts is not None:
        mlp = a.experts.per_token * (3 * a.experts.size + a.hidden_size)
    widest = max(attention, gdn, mlp) // tp
    rows = engine.concurrency * (engine.draft_tokens + 1)
    return (
        engine.batched_tokens * (2 * a.hidden_size + widest) * TABLE_BYTES
        + rows * a.vocab_size * LOGIT_BYTES
    )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What one card holds, in bytes; None where the card's memory is not known."""

    weights: PerPart
    load_transient: int
    gdn_state_bytes: int
    """Of one running request, all GDN layers, without the padding to blocks."""
    gdn_states: int
    """States per request in each GDN layer."""
    kv_bytes_per_token: int
    """All attention layers, the MTP layer among them while drafting."""
    cache: Cache
    cuda_graphs: int
    activations: int
    runtime: int
    context: int
    concurrency: int
    memory: int | None
    budget: int | None
    """The share of `memory` that the engine may use."""

    @property
    def fixed(self) -> int:
        """Everything but the cache."""
        return int(self.weights.total) + self.cuda_graphs + self.activations + self.runtime

    @property
    def cache_bytes(self) -> int:
        """The cache for `concurrency` requests of `context` tokens, padding included."""
        return self.concurrency * self.cache.blocks(self.context) * self.cache.block_bytes

    @property
    def required(self) -> int:
        """Bytes the engine needs while it serves."""
        return self.fixed + self.cache_bytes

    @property
    def load_peak(self) -> int:
        """Bytes needed while loading, when there is no cache yet."""
        return int(self.weights.total) + self.load_transient + self.runtime

    @property
    def blocks(self) -> int | None:
        """Cache blocks that the budget leaves room for."""
        if self.budget is None:
            return None
        return max(0, self.budget - self.fixed) // self.cache.block_bytes

    @property
    def loads(self) -> bool | None:
        """Whether the weights and the transient copies fit into the card's memory."""
        return None if self.memory is None else self.load_peak <= self.memory

    @property
    def fits(self) -> bool | None:
        """Whether it loads and then serves `concurrency` requests of `context` tokens."""
        if self.budget is None:
            return None
        return bool(self.loads) and self.required <= self.budget

    @property
    def largest_concurrency(self) -> int | None:
        """Requests of `context` tokens that run at once; 0 where not even one does."""
        return None if self.blocks is None else self.blocks // self.cache.blocks(self.context)

    @property
    def largest_context(self) -> int | None:
        """Tokens of each of `concurrency` requests, before the model's own limit."""
        return None if self.blocks is None else self.cache.context(self.blocks // self.concurrency)


def fit(engine: Engine, memory: int | None, utilization: float = 0.9) -> MemoryPlan:
    """The plan of one card with `memory` bytes, of which `utilization` is the engine's share.

    Activations and logits are those of `engine.concurrency`; the plan's largest
    concurrency and context are what the cache allows beside them. Raises PlannerError.
    """
    if not 0 < utilization <= 1:
        raise PlannerError(f"utilization: found {utilization}; give a share above 0, up to 1")
    a, k, tp = engine.architecture, engine.draft_tokens, engine.tensor_parallel
    page = a.gdn_page_bytes(k, ssm_dtype=engine.ssm_dtype, tensor_parallel=tp)
    states = gdn_states_per_request(k, prefix_caching=engine.prefix_caching)
    per_layer = a.kv_bytes_per_token_per_layer(engine.kv_dtype, tensor_parallel=tp)
    return MemoryPlan(
        weights=weights(
            a, engine.precision, draft_tokens=k, vision=engine.vision, tensor_parallel=tp
        ),
        load_transient=load_transient_bytes(a, k, tensor_parallel=tp),
        gdn_state_bytes=page * states * a.layers.gdn,
        gdn_states=states if a.gdn else 0,
        kv_bytes_per_token=per_layer * (a.layers.full_attention + (a.mtp_layers if k else 0)),
        cache=cache_of(engine),
        cuda_graphs=CUDA_GRAPH_BYTES if engine.cuda else 0,
        activations=activation_bytes(engine),
        runtime=RUNTIME_BYTES if engine.cuda else 0,
        context=engine.context,
        concurrency=engine.concurrency,
        memory=memory,
        budget=None if memory is None else int(memory * utilization),
    )


def _check_split(a: Architecture, tensor_parallel: int) -> None:
    """Whether every card gets whole heads, as vLLM asks for."""
    heads = {"attention heads": a.heads}
    if a.gdn is not None:
        heads |= {"GDN key heads": a.gdn.key_heads, "GDN value heads": a.gdn.value_heads}
    for what, count in heads.items():
        if count % tensor_parallel:
            raise PlannerError(
                f"tensor_parallel: found {tensor_parallel}, which does not divide the {count} "
                f"{what}; choose a divisor"
            )
