"""What people call weights in published measurements, as bits by part of the model.

Owns reading names such as `UD-Q4_K_XL`, `AWQ 4-bit` or `INT4, INT4 head`, and what to
assume where none is given. Leaves the catalogue's checkpoints to `precision`.
"""

from __future__ import annotations

import re

from serving.catalog.gpus import GpuClass
from serving.catalog.models import ModelEntry
from serving.planner.constants import LLAMA_CPP, EngineFamily
from serving.planner.errors import PlannerError
from serving.planner.parameters import count_parameters
from serving.planner.precision import (
    BF16,
    INT4_BITS,
    LAYOUTS,
    Q4_K_M_BITS,
    Q6_K_BITS,
    Precision,
    gguf,
)

GIB = 1024**3
# Bits per weight of whole files (ggml-org/llama.cpp examples/quantize/README.md, Llama 2 7B), of
# single block formats where those are the file.
GGUF_BITS = {
    "IQ1": 1.75,
    "IQ2": 2.4,
    "IQ3": 3.3,
    "IQ4": 4.4,
    "Q2_K": 3.35,
    "Q3_K_S": 3.50,
    "Q3_K_M": 3.91,
    "Q3_K_L": 4.27,
    "Q4_0": 4.55,
    "Q4_1": 5.0,
    "Q4_K_S": 4.58,
    "Q4_K_M": Q4_K_M_BITS,
    "Q5_0": 5.5,
    "Q5_1": 6.0,
    "Q5_K_S": 5.52,
    "Q5_K_M": 5.68,
    "Q6_K": Q6_K_BITS,
    "Q8_0": 8.5,
}
# Unsloth's _XL files spend a little more than the _M ones: 17.9 GB against 17.1 for the 27B.
XL_EXTRA_BITS = 0.25
_GGUF = re.compile(r"(?<![A-Z0-9])I?Q\d(_\d|_K)?(_XL|_[SML])?")
_BITS_BY_FILE_SIZE = {2: "Q2_K", 3: "Q3_K_M", 4: "Q4_K_M", 5: "Q5_K_M", 6: "Q6_K", 8: "Q8_0"}
# Where a published row names no weights: the larger of two common files that leaves this share of
# the card's memory to everything else.
FREE_SHARE = 0.4


def precision_of_name(
    name: str | None, entry: ModelEntry, family: EngineFamily, gpu: GpuClass
) -> Precision:
    """The bits by part that `name` stands for; raises PlannerError for an unknown name."""
    if name is None:
        return _assumed(entry, family, gpu)
    text = name.upper().replace("-", "_").replace("UD_", "")
    if found := _GGUF.search(text):
        return gguf(name, _gguf_bits(found.group(0)))
    plain = name.upper().replace("-", "").replace(" ", "").replace("_", "")
    if family.vector_fraction is not None and (bits := re.search(r"([234568])BIT", plain)):
        file = _BITS_BY_FILE_SIZE[int(bits.group(1))]
        return gguf(f"{file}, for {name}", GGUF_BITS[file])
    return _safetensors(name, plain, entry)


def _gguf_bits(file: str) -> float:
    """Bits per weight of a GGUF type's name, as `Q4_K_XL` or `IQ3_XXS`."""
    if file.startswith("I"):
        return GGUF_BITS[file[:3]]
    if file in GGUF_BITS:
        return GGUF_BITS[file]
    base = "_".join(file.split("_")[:2])
    near = GGUF_BITS.get(f"{base}_M") or GGUF_BITS.get(base)
    if near is None:
        near = GGUF_BITS.get(_BITS_BY_FILE_SIZE.get(int(file[1]), ""))
    if near is None:
        raise PlannerError(f"weights: found {file!r}; known are {', '.join(GGUF_BITS)}")
    return near + (XL_EXTRA_BITS if file.endswith("_XL") else 0)


def _safetensors(name: str, plain: str, entry: ModelEntry) -> Precision:
    if re.search(r"NVFP4|MXFP4|W4A4|FP4", plain):
        return LAYOUTS["nvfp4"][0]
    if re.search(r"FP8|W8A8|INT8|8BIT", plain):
        return LAYOUTS["fp8"][0]
    if re.search(r"BF16|FP16|F16|16BIT", plain) and "INT4" not in plain:
        return BF16
    if not re.search(r"AWQ|GPTQ|INT4|W4A16|AUTOROUND|4BIT|MARLIN", plain):
        raise PlannerError(
            f"weights: found {name!r}; write a GGUF type such as Q4_K_M, or BF16, FP8, NVFP4, "
            "INT4, AWQ, GPTQ or AutoRound"
        )
    whole, with_head, _, experts_only = LAYOUTS["int4"]
    if "INT4HEAD" in plain:
        return with_head.with_bits({"mtp": INT4_BITS, "mtp_experts": INT4_BITS}, name)
    # AWQ exports of the 35B leave everything but the experts in bf16: 24 GB.
    return experts_only if entry.architecture.experts and "AWQ" in plain else whole


def _assumed(entry: ModelEntry, family: EngineFamily, gpu: GpuClass) -> Precision:
    """The weights of a row that names none: the largest common form that leaves room."""
    if family is LLAMA_CPP:
        forms = [gguf(name, GGUF_BITS[name]) for name in ("Q8_0", "Q4_K_M")]
    else:
        forms = [BF16, LAYOUTS["fp8"][0], LAYOUTS["int4"][0]]
    parameters = count_parameters(entry.architecture)
    room = (gpu.memory_gib or 0) * GIB * (1 - FREE_SHARE)
    fitting = (form for form in forms if form.bytes_of(parameters).total <= room)
    return next(fitting, forms[-1])
