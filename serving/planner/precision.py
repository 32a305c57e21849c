"""How many bits a checkpoint spends on each part of a model.

Owns the layouts that quantisers leave behind and which of them a checkpoint has.
Leaves the parameter counts to `parameters`, names of weights in published
measurements to `weight_names`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from serving.catalog.models import Checkpoint, ModelEntry, Quantisation
from serving.planner.parameters import PARTS, Part, PerPart, count_parameters

# Four bits, and per group of 128 a 16-bit scale and a 4-bit zero point (AWQ and GPTQ exports).
INT4_BITS = 4 + 20 / 128
# Four bits, and an 8-bit scale for each block of 16 (NVIDIA's NVFP4).
NVFP4_BITS = 4 + 8 / 16
# The scales of 128 x 128 blocks are too few to count.
FP8_BITS = 8.0


@dataclass(frozen=True, slots=True)
class Precision:
    """Bits per parameter by part; `name` says what was assumed."""

    name: str
    bits: Mapping[Part, float]

    def bytes_of(self, parameters: PerPart) -> PerPart:
        """Bytes by part."""
        return parameters.times({part: bits / 8 for part, bits in self.bits.items()})

    def with_bits(self, bits: Mapping[Part, float], name: str) -> Precision:
        """The same with other bits for some parts."""
        return Precision(name, {**self.bits, **bits})


BF16 = Precision("bf16", dict.fromkeys(PARTS, 16.0))


def _linear(bits: float, *, attention: float | None = None, gdn: float | None = None) -> Precision:
    """Linear layers of the trunk quantised; embedding, lm_head, MTP and vision left in bf16."""
    attention = bits if attention is None else attention
    gdn = attention if gdn is None else gdn
    given: dict[Part, float] = {"ffn": bits, "experts": bits, "attention": attention, "gdn": gdn}
    return BF16.with_bits({**given, "shared": attention}, "")


_TRUNK_INT4 = _linear(INT4_BITS)
# What exports of each kind were seen to hold, the commonest first. Checked against the sizes of
# the catalogue's checkpoints: docs/planner.md has the table.
LAYOUTS: dict[Quantisation, tuple[Precision, ...]] = {
    "bf16": (BF16,),
    # Qwen's own exports keep the MTP layer in FP8 too: 30.867 GB for the 27B.
    "fp8": (
        _linear(FP8_BITS).with_bits(
            {"mtp": FP8_BITS, "mtp_experts": FP8_BITS}, "FP8 linear layers, MTP included"
        ),
    ),
    "nvfp4": (
        _linear(NVFP4_BITS, attention=FP8_BITS).with_bits(
            {}, "NVFP4 experts or FFN, FP8 attention"
        ),
        _linear(NVFP4_BITS, gdn=16).with_bits({}, "NVFP4 linear layers, GDN in bf16"),
        _linear(NVFP4_BITS, attention=16).with_bits({}, "NVFP4 experts or FFN, else bf16"),
    ),
    "int4": (
        _TRUNK_INT4.with_bits({}, "INT4 linear layers, bf16 lm_head and MTP"),
        _TRUNK_INT4.with_bits({"lm_head": INT4_BITS}, "INT4 linear layers and lm_head, bf16 MTP"),
        _linear(INT4_BITS, gdn=16).with_bits({}, "INT4 linear layers, GDN in bf16"),
        _linear(INT4_BITS, attention=16).with_bits({}, "INT4 experts or FFN, else bf16"),
    ),
}


def gguf(name: str, bits: float) -> Precision:
    """A GGUF file of `bits` per weight: every part quantised, lm_head in Q6_K at least."""
    rounded = dict.fromkeys(PARTS, bits)
    return Precision(name, {**rounded, "lm_head": max(bits, Q6_K_BITS), "vision": 16.0})


Q6_K_BITS = 6.5625
Q4_K_M_BITS = 4.85


def precision_of(entry: ModelEntry, key: str) -> Precision:
    """The layout of the checkpoint called `key`; raises CatalogError for an unknown one.

    Of the layouts of its quantisation the one whose sum is nearest to the published size;
    the commonest where no size is published.
    """
    checkpoint = entry.checkpoint(key)
    if checkpoint.quantisation == "gguf":
        return gguf("Q4_K_M", Q4_K_M_BITS)
    layouts = LAYOUTS[checkpoint.quantisation]
    off = [abs(size_error(entry, checkpoint, layout) or 0.0) for layout in layouts]
    return layouts[off.index(min(off))]


def size_error(entry: ModelEntry, checkpoint: Checkpoint, precision: Precision) -> float | None:
    """The sum of the parts over the published size, minus 1; None where none is published."""
    if checkpoint.size_gb is None:
        return None
    parameters = count_parameters(entry.architecture)
    return precision.bytes_of(parameters).total / (checkpoint.size_gb * 1e9) - 1
