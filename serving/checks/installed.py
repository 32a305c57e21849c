"""What the installed vLLM's source says where a version number does not.

Owns reading it as text: importing vLLM takes some ten seconds. Leaves the installed
version to `versions`.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

# Where the kernel that looks a GDN state up is in 0.32, and was before.
_KERNELS = (
    "third_party/flash_linear_attention/ops/fused_sigmoid_gating.py",
    "model_executor/layers/fla/ops/fused_sigmoid_gating.py",
)
_LOAD = "tl.load(num_accepted_tokens"
_BOUNDS = ("tl.maximum", "tl.minimum", "tl.clamp")


@cache
def installed_index_bounded() -> bool | None:
    """Whether the installed kernel bounds its index of accepted drafts.

    None where vLLM is not installed, or has the kernel elsewhere.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    for kernel in _KERNELS:
        path = Path(spec.origin).parent / kernel
        if path.is_file():
            return index_bounded(path.read_text(encoding="utf-8", errors="replace"))
    return None


def index_bounded(kernel: str) -> bool | None:
    """Whether the number of accepted drafts is bounded where it is read or just after."""
    before, load, after = kernel.partition(_LOAD)
    if not load:
        return None
    statement = before.rpartition("\n")[2] + after.partition("tl.load(")[0]
    return any(bound in statement for bound in _BOUNDS)
