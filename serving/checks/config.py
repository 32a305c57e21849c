"""What a checkpoint's config.json says, as far as rules depend on it.

Owns taking typed facts out of JSON that may hold anything. A field of the wrong type
counts as absent. Leaves what the facts mean to the rules, and the quantisation block
to `quantisation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from serving.catalog.models import Architecture

Json = Mapping[str, Any]
# The model types of Qwen3.5, 3.6 and 3.8: dense and MoE, with images and without.
QWEN3_5 = frozenset({"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})
# Numbers beyond this are no layer counts and no sizes, whatever the file says.
MAX_SIZE = 2**24


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """config.json; `text` is its `text_config` where there is one, else the whole."""

    raw: Json
    text: Json

    @classmethod
    def of(cls, raw: Json) -> ModelConfig:
        """Of the parsed file."""
        text = raw.get("text_config")
        return cls(raw, text if isinstance(text, dict) else raw)

    @property
    def model_type(self) -> str:
        """`model_type`, empty where there is none."""
        value = self.raw.get("model_type")
        return value if isinstance(value, str) else ""

    @property
    def architectures(self) -> tuple[str, ...]:
        """The class names in `architectures`."""
        value = self.raw.get("architectures")
        return _texts(value)

    @property
    def mtp_layers(self) -> int:
        """`mtp_num_hidden_layers`; 0 where it is not given."""
        return self.size("mtp_num_hidden_layers") or 0

    @property
    def text_only(self) -> bool:
        """Whether the model takes no images, by its type or its class."""
        causal = any(name.endswith("ForCausalLM") for name in self.architectures)
        return self.model_type.endswith("_text") or causal

    @property
    def rope(self) -> Json:
        """`rope_parameters`, formerly `rope_scaling`."""
        for name in ("rope_parameters", "rope_scaling"):
            value = self.text.get(name)
            if isinstance(value, dict):
                return value
        return {}

    def size(self, name: str) -> int | None:
        """A whole number from 0 on; None where it is absent or something else."""
        value = self.text.get(name, self.raw.get(name))
        return value if type(value) is int and 0 <= value <= MAX_SIZE else None

    def flag(self, name: str, default: bool) -> bool:
        """A yes or no."""
        value = self.text.get(name, self.raw.get(name))
        return value if isinstance(value, bool) else default

    @property
    def attention_gate(self) -> bool:
        """Whether q_proj makes an output gate as wide as the queries; Qwen3.5's default."""
        return self.flag("attn_output_gate", True)

    @property
    def dense(self) -> bool:
        """Whether there are no routed experts."""
        return not self.size("num_experts")

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The kind of each layer, from `layer_types` or `full_attention_interval`."""
        given, count = self.text.get("layer_types"), self.size("num_hidden_layers")
        if isinstance(given, list):
            return _texts(given)
        interval = self.size("full_attention_interval")
        if not interval or not count or count > 4096:
            return ()
        kinds = ("full_attention", "linear_attention")
        return tuple(kinds[(layer + 1) % interval > 0] for layer in range(count))

    @property
    def gdn(self) -> bool:
        """Whether some layers keep a gated delta net's state."""
        return "linear_attention" in self.layer_types

    def architecture(self) -> Architecture | None:
        """The catalogue's form of it; None for another family, or where fields are missing."""
        if self.model_type not in QWEN3_5:
            return None
        try:
            return Architecture.model_validate(self._described())
        except ValidationError:
            return None

    def _described(self) -> dict[str, Any]:
        size, kinds = self.size, self.layer_types
        gdn = {
            "key_heads": size("linear_num_key_heads"),
            "value_heads": size("linear_num_value_heads"),
            "key_dim": size("linear_key_head_dim"),
            "value_dim": size("linear_value_head_dim"),
            "conv_kernel": size("linear_conv_kernel_dim"),
        }
        experts = {
            "count": size("num_experts"),
            "per_token": size("num_experts_per_tok"),
            "size": size("moe_intermediate_size"),
            "shared_size": size("shared_expert_intermediate_size") or None,
        }
        return {
            "layers": {
                "full_attention": kinds.count("full_attention"),
                "gdn": kinds.count("linear_attention"),
            },
            "hidden_size": size("hidden_size"),
            "heads": size("num_attention_heads"),
            "kv_heads": size("num_key_value_heads"),
            "head_dim": size("head_dim"),
            "attention_gate": self.attention_gate,
            "gdn": gdn if self.gdn else None,
            "mamba_ssm_dtype": self.text.get("mamba_ssm_dtype", "float32") if self.gdn else None,
            "ffn_size": size("intermediate_size") if self.dense else None,
            "experts": None if self.dense else experts,
            "mtp_layers": self.mtp_layers,
            "vocab_size": size("vocab_size"),
            "tie_embeddings": self.flag("tie_word_embeddings", False),
            "vision": not self.text_only,
        }


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(each for each in value if isinstance(each, str)) if isinstance(value, list) else ()
