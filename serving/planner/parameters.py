"""How many parameters a model has in each part, counted from its architecture.

Owns the counts, exact for the Qwen3.5 architecture (the safetensors headers of the
demo models agree to the parameter). Leaves bytes per parameter to `precision`, what
a card holds to `memory`, what a step reads to `traffic`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

from serving.catalog.models import Architecture

Part = Literal[
    "embedding",
    "attention",
    "gdn",
    "ffn",
    "shared",
    "experts",
    "lm_head",
    "mtp",
    "mtp_experts",
    "vision",
]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, slots=True)
class PerPart:
    """One figure for each part of a model; the unit is the user's."""

    embedding: float
    attention: float
    """Full and sliding attention layers, their norms included."""
    gdn: float
    """Gated delta net layers, their norms included."""
    ffn: float
    """Feed-forward layers of a dense model."""
    shared: float
    """Routers and shared experts: what every token reads of a mixture of experts."""
    experts: float
    """Routed experts, all of them."""
    lm_head: float
    mtp: float
    """MTP layers without their routed experts."""
    mtp_experts: float
    vision: float

    @property
    def total(self) -> float:
        """The sum over the parts."""
        return sum(self.by_part().values())

    def by_part(self) -> dict[Part, float]:
        """The figures by name, in the order of the parts."""
        return {part: getattr(self, part) for part in PARTS}

    def times(self, factors: Mapping[Part, float]) -> PerPart:
        """Each part's figure times that part's factor."""
        return PerPart(**{part: each * factors[part] for part, each in self.by_part().items()})


assert tuple(each.name for each in fields(PerPart)) == PARTS


def count_parameters(architecture: Architecture) -> PerPart:
    """Parameters by part.

    A vision tower of unknown size counts as nothing; a drafting checkpoint of its
    own (Gemma 4's assistant) belongs to no part.
    """
    a = architecture
    attention = _attention(a, a.kv_heads, a.head_dim)
    sliding = _attention(a, a.sliding.kv_heads, a.sliding.head_dim) if a.sliding else 0
    shared = _shared(a)
    experts = _routed(a)
    table = a.vocab_size * a.hidden_size
    # The MTP layer: one attention decoder layer, the fusion of embedding and hidden state
    # (2h x h), and three norms.
    mtp_layer = attention + _dense(a) + shared + 2 * a.hidden_size**2 + 3 * a.hidden_size
    return PerPart(
        embedding=table,
        attention=attention * a.layers.full_attention + sliding * a.layers.sliding_attention,
        gdn=_gdn(a) * a.layers.gdn,
        ffn=_dense(a) * a.layers.total,
        shared=shared * a.layers.total,
        experts=experts * a.layers.total,
        # The final norm goes with the head; tied, the head is the embedding.
        lm_head=(0 if a.tie_embeddings else table) + a.hidden_size,
        mtp=mtp_layer * a.mtp_layers,
        mtp_experts=experts * a.mtp_layers,
        vision=a.vision_parameters or 0,
    )


def _attention(a: Architecture, kv_heads: int, head_dim: int) -> int:
    """Projections q (and its gate), k, v and o, the norms of q and k, and two of the layer."""
    width = a.heads * head_dim
    queries = width * (2 if a.attention_gate else 1)
    projections = a.hidden_size * (queries + 2 * kv_heads * head_dim + width)
    return projections + 2 * head_dim + 2 * a.hidden_size


def _gdn(a: Architecture) -> int:
    """Projections qkv, z, a and b, convolution, decay, output, and the norms.

    transformers 5.19, models/qwen3_5/modeling_qwen3_5.py.
    """
    if a.gdn is None:
        return 0
    g = a.gdn
    values = g.value_heads * g.value_dim
    channels = 2 * g.key_heads * g.key_dim + values
    projections = a.hidden_size * (channels + 2 * values + 2 * g.value_heads)
    small = channels * g.conv_kernel + 2 * g.value_heads + g.value_dim
    return projections + small + 2 * a.hidden_size


def _dense(a: Architecture) -> int:
    return 3 * a.hidden_size * (a.ffn_size or 0)


def _shared(a: Architecture) -> int:
    """Router, shared expert and its gate."""
    if a.experts is None:
        return 0
    router = a.hidden_size * a.experts.count
    shared = a.experts.shared_size
    return router + (0 if shared is None else 3 * a.hidden_size * shared + a.hidden_size)


def _routed(a: Architecture) -> int:
    return 3 * a.hidden_size * a.experts.size * a.experts.count if a.experts else 0
