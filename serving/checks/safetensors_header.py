"""The header of a safetensors file: names, types and shapes of its tensors.

Owns reading the header within bounds and telling a cut or damaged file. Reads no
tensor data. The format: 8 bytes, little endian, with the length of a JSON object,
the object, then the data, to which `data_offsets` refer
(huggingface/safetensors README, "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving.checks.source import CheckpointSource

# The library's own limit (safetensors 0.8, MAX_HEADER_SIZE).
MAX_HEADER_BYTES = 100_000_000
# One read holds the header of most files: that of a shard with 500 tensors has about 60 kB.
FIRST_READ_BYTES = 128 * 1024
MAX_DIMENSIONS = 16

# Bits per value, by the names of safetensors 0.8.
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


class HeaderError(ValueError):
    """A file is no whole safetensors file; the text says what was found."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as its header describes it."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    file: str


def read_header(source: CheckpointSource, name: str) -> dict[str, Tensor]:
    """The tensors of the file `name`, by name.

    Raises HeaderError for a damaged or cut file, CheckError where it cannot be read.
    """
    size = source.sizes[name]
    if size < 8:
        raise HeaderError(f"{size} bytes, too short for a safetensors file")
    start = source.read(name, 0, FIRST_READ_BYTES)
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise HeaderError(
            f"a header of {length} bytes is announced; {MAX_HEADER_BYTES} is the most"
        )
    if length < 2 or 8 + length > size:
        raise HeaderError(f"a header of {length} bytes is announced in a file of {size}")
    raw = start[8 : 8 + length]
    if len(raw) < length:
        raw += source.read(name, 8 + len(raw), length - len(raw))
    if len(raw) < length:
        raise HeaderError(f"ends within its header, after {8 + len(raw)} bytes")
    tensors, data = _parse(raw, name)
    if 8 + length + data > size:
        raise HeaderError(
            f"holds {size} bytes, its tensors need {8 + length + data}; it is cut off"
        )
    if 8 + length + data < size:
        raise HeaderError(f"holds {size} bytes, its tensors end after {8 + length + data}")
    return tensors


def _parse(raw: bytes, file: str) -> tuple[dict[str, Tensor], int]:
    """The tensors, and the bytes of data they take."""
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise HeaderError("the header is not JSON") from None
    if not isinstance(header, dict):
        raise HeaderError("the header is no JSON object")
    header.pop("__metadata__", None)
    spans: list[tuple[int, int]] = []
    tensors: dict[str, Tensor] = {}
    for name, entry in header.items():
        tensors[name] = _tensor(name, entry, file, spans)
    return tensors, _end_of_data(spans)


def _tensor(name: str, entry: Any, file: str, spans: list[tuple[int, int]]) -> Tensor:
    fields: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
    dtype = fields.get("dtype")
    shape, offsets = _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None:
        raise HeaderError(f"the tensor {name[:80]!r} has no usable dtype and shape")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise HeaderError(f"the tensor {name[:80]!r} has no usable data_offsets")
    begin, end = offsets
    need = math.prod(shape) * DTYPE_BITS.get(dtype, 0)
    if dtype in DTYPE_BITS and need != 8 * (end - begin):
        raise HeaderError(
            f"the tensor {name[:80]!r}, {dtype} {list(shape)}, has {end - begin} bytes instead of "
            f"{math.ceil(need / 8)}"
        )
    spans.append((begin, end))
    return Tensor(dtype, shape, end - begin, file)


def _sizes(value: Any) -> tuple[int, ...] | None:
    """A short list of whole numbers from 0 on that a file can have; None for anything else."""
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        return None
    usable = all(type(each) is int and 0 <= each < 2**63 for each in value)
    return tuple(value) if usable else None


def _end_of_data(spans: list[tuple[int, int]]) -> int:
    """Where the last tensor ends; the data has neither gaps nor overlaps."""
    end = 0
    for begin, stop in sorted(spans):
        if begin != end:
            raise HeaderError(f"the data of its tensors overlap or leave a gap at byte {end}")
        end = stop
    return end
