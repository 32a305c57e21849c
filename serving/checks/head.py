"""The MTP head of Qwen3.5's family: which tensors it has, of which shapes.

Owns the layout, for dense models (15 tensors per layer count of 1), for experts
saved together (19) and one by one. Leaves comparing it with a checkpoint to the
rules. Source: vLLM 0.32.0, model_executor/models/qwen3_5_mtp.py and qwen3_next.py;
the shipped demo models have exactly these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from serving.checks.config import QWEN3_5, ModelConfig
from serving.checks.safetensors_header import Tensor

PREFIX = "mtp."
# What a linear layer's values are called: as they are, by compressed-tensors, by GPTQ and AWQ.
_VALUES = (".weight", ".weight_packed", ".qweight")
_PACKED = (".weight_packed", ".qweight")
# Types that hold a weight as it is; all others are quantised.
PLAIN_DTYPES = frozenset({"BF16", "F16", "F32"})
# More layers or experts than any model has are not spelt out.
MAX_LAYERS, MAX_EXPERTS = 64, 4096

Shape = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One module of the head, with the shape of its weight; None where config.json is silent."""

    name: str
    shape: Shape
    quantisable: bool = False
    """Whether a quantiser touches it: linear layers, routers left out."""


@dataclass(frozen=True, slots=True)
class Stored:
    """How a module is stored."""

    tensor: Tensor
    packed: bool

    @property
    def quantised(self) -> bool:
        """Whether the values are not the weights themselves."""
        return self.packed or self.tensor.dtype not in PLAIN_DTYPES


def stored_modules(tensors: Mapping[str, Tensor]) -> dict[str, Stored]:
    """The head's modules, by name; scales and zero points are left out."""
    found = {}
    for name, tensor in tensors.items():
        if not name.startswith(PREFIX):
            continue
        for suffix in _VALUES:
            if name.endswith(suffix):
                found[name.removesuffix(suffix)] = Stored(tensor, suffix in _PACKED)
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            found[name] = Stored(tensor, packed=False)
    return found


def layout(config: ModelConfig, stored: Mapping[str, Stored]) -> tuple[Part, ...]:
    """The parts the head must have; () for a family whose layout is not known.

    `stored` decides whether experts are expected together or one by one.
    """
    count = config.mtp_layers
    if config.model_type not in QWEN3_5 or not 0 < count <= MAX_LAYERS:
        return ()
    hidden = config.size("hidden_size")
    parts = [
        Part("mtp.fc", (hidden, _times(2, hidden)), quantisable=True),
        *(Part(f"mtp.{name}", (hidden,)) for name in _NORMS),
    ]
    for layer in range(count):
        prefix = f"mtp.layers.{layer}"
        parts += _attention(config, prefix)
        parts += _feed_forward(config, f"{prefix}.mlp", stored)
    return tuple(parts)


_NORMS = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")


def _attention(config: ModelConfig, prefix: str) -> list[Part]:
    size = config.size
    hidden, dim = size("hidden_size"), size("head_dim")
    values = _times(size("num_attention_heads"), dim)
    keys = _times(size("num_key_value_heads"), dim)
    queries = _times(2, values) if config.attention_gate else values
    return [
        Part(f"{prefix}.input_layernorm", (hidden,)),
        Part(f"{prefix}.post_attention_layernorm", (hidden,)),
        Part(f"{prefix}.self_attn.q_norm", (dim,)),
        Part(f"{prefix}.self_attn.k_norm", (dim,)),
        Part(f"{prefix}.self_attn.q_proj", (queries, hidden), quantisable=True),
        Part(f"{prefix}.self_attn.k_proj", (keys, hidden), quantisable=True),
        Part(f"{prefix}.self_attn.v_proj", (keys, hidden), quantisable=True),
        Part(f"{prefix}.self_attn.o_proj", (hidden, values), quantisable=True),
    ]


def _feed_forward(config: ModelConfig, prefix: str, stored: Mapping[str, Stored]) -> list[Part]:
    size = config.size
    hidden, experts = size("hidden_size"), size("num_experts")
    if not experts:
        return _mlp(prefix, hidden, size("intermediate_size"))
    parts = [Part(f"{prefix}.gate", (experts, hidden))]
    shared = size("shared_expert_intermediate_size")
    if shared:
        parts += _mlp(f"{prefix}.shared_expert", hidden, shared)
        parts.append(Part(f"{prefix}.shared_expert_gate", (1, hidden)))
    inner = size("moe_intermediate_size")
    together = f"{prefix}.experts"
    if f"{together}.gate_up_proj" in stored or f"{together}.down_proj" in stored:
        both = (experts, _times(2, inner), hidden)
        parts.append(Part(f"{together}.gate_up_proj", both, quantisable=True))
        parts.append(Part(f"{together}.down_proj", (experts, hidden, inner), quantisable=True))
        return parts
    for expert in range(min(experts, MAX_EXPERTS)):
        parts += _mlp(f"{together}.{expert}", hidden, inner)
    return parts


def _mlp(prefix: str, hidden: int | None, inner: int | None) -> list[Part]:
    return [
        Part(f"{prefix}.gate_proj", (inner, hidden), quantisable=True),
        Part(f"{prefix}.up_proj", (inner, hidden), quantisable=True),
        Part(f"{prefix}.down_proj", (hidden, inner), quantisable=True),
    ]


def _times(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first * second
