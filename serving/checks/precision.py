"""Bits per parameter of a checkpoint, measured from its headers.

Owns adding up tensors by part. Leaves what the bits mean for memory to the planner.
"""

from __future__ import annotations

from serving.catalog.models import Architecture
from serving.checks.checkpoint import Checkpoint
from serving.checks.head import PREFIX
from serving.planner.parameters import PARTS, Part, count_parameters
from serving.planner.precision import Precision

# The planner's parts that a tensor's name tells apart; all others are the trunk.
_NAMED: tuple[tuple[str, tuple[Part, ...]], ...] = (
    (PREFIX, ("mtp", "mtp_experts")),
    ("visual.", ("vision",)),
    ("embed_tokens.", ("embedding",)),
    ("lm_head.", ("lm_head",)),
)
_TRUNK: tuple[Part, ...] = ("attention", "gdn", "ffn", "shared", "experts")


def measured_precision(
    checkpoint: Checkpoint | None, architecture: Architecture | None
) -> Precision | None:
    """Each part's bits per parameter, scales included; None where not all files were read.

    Parts that names do not tell apart share one figure, their sum being exact.
    """
    if checkpoint is None or architecture is None or not checkpoint.complete:
        return None
    sizes: dict[tuple[Part, ...], int] = {}
    for name, tensor in checkpoint.tensors.items():
        parts = next((parts for word, parts in _NAMED if _is_part(name, word)), _TRUNK)
        sizes[parts] = sizes.get(parts, 0) + tensor.bytes
    parameters = count_parameters(architecture).by_part()
    bits: dict[Part, float] = dict.fromkeys(PARTS, 16.0)
    for parts, size in sizes.items():
        count = sum(parameters[part] for part in parts)
        bits |= dict.fromkeys(parts, 8 * size / count if count else 0.0)
    return Precision("measured from the headers", bits)


def _is_part(name: str, word: str) -> bool:
    """Whether the name begins with `word`, or with it after a dot."""
    return name.startswith(word) or f".{word}" in name
