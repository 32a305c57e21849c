"""The header of a GGUF file: its metadata and the names of its tensors.

Owns reading version 2 and 3 within bounds; of a list only its length is kept. The
format: ggml-org/ggml docs/gguf.md. Reads no tensor data.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from serving.checks.safetensors_header import HeaderError
from serving.checks.source import CheckpointSource

# A vocabulary of 250,000 tokens with its merges takes about 12 MB.
MAX_HEADER_BYTES = 128 * 2**20
READ_BYTES = 4 * 2**20
MAX_KEYS = 65_536
MAX_TENSORS = 1_048_576
MAX_NAME_BYTES = 65_536
MAX_DIMENSIONS = 8

# GGUF's value types: number -> how struct reads it.
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f",
    7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What the file says of itself."""

    metadata: dict[str, Any]
    """Values by key; of a list the number of its items."""
    tensors: frozenset[str]

    @property
    def architecture(self) -> str:
        """`general.architecture`, such as qwen35moe; empty where it is not given."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else ""

    def count(self, key: str) -> int | None:
        """A whole number of the architecture's own keys, such as block_count."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        return value if type(value) is int else None


def read_header(source: CheckpointSource, name: str) -> GgufHeader:
    """The header of the file `name`.

    Raises HeaderError for a damaged or cut file, CheckError where it cannot be read.
    """
    reader = _Reader(source, name)
    if reader.take(4) != b"GGUF":
        raise HeaderError("does not begin as a GGUF file")
    version = reader.number("<I")
    if version not in (2, 3):
        raise HeaderError(f"GGUF version {version}; 2 and 3 are known")
    tensors, keys = reader.number("<Q"), reader.number("<Q")
    if tensors > MAX_TENSORS or keys > MAX_KEYS:
        raise HeaderError(f"{tensors} tensors and {keys} keys are announced, which no file has")
    metadata = {}
    for _ in range(keys):
        key = reader.text()
        metadata[key] = reader.value(reader.number("<I"))
    return GgufHeader(metadata, frozenset(_tensor_name(reader) for _ in range(tensors)))


def _tensor_name(reader: _Reader) -> str:
    name = reader.text()
    dimensions = reader.number("<I")
    if dimensions > MAX_DIMENSIONS:
        raise HeaderError(f"the tensor {name[:80]!r} has {dimensions} dimensions")
    # Dimensions, the type and the offset of the data.
    reader.skip(8 * dimensions + 4 + 8)
    return name


class _Reader:
    """Reads a file from its start, a stretch at a time, up to MAX_HEADER_BYTES."""

    def __init__(self, source: CheckpointSource, name: str) -> None:
        self._source, self._name = source, name
        self._held, self._at, self._read = b"", 0, 0

    def take(self, length: int) -> bytes:
        """The next `length` bytes; raises HeaderError where the file ends before."""
        while len(self._held) - self._at < length:
            self._more(length)
        self._at += length
        return self._held[self._at - length : self._at]

    def skip(self, length: int) -> None:
        self.take(length)

    def number(self, form: str) -> int:
        found: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return found

    def text(self) -> str:
        length = self.number("<Q")
        if length > MAX_NAME_BYTES:
            raise HeaderError(f"a name of {length} bytes is announced")
        return self.take(length).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """A value of a type; the length of a list."""
        if kind in _SCALARS:
            return struct.unpack(_SCALARS[kind], self.take(struct.calcsize(_SCALARS[kind])))[0]
        if kind == _STRING:
            return self._long_text()
        if kind == _ARRAY:
            return self._list()
        raise HeaderError(f"a value of the unknown type {kind}")

    def _long_text(self) -> str:
        # A chat template may be longer than a name.
        return self.take(self._bounded(self.number("<Q"))).decode("utf-8", "replace")

    def _list(self) -> int:
        kind, count = self.number("<I"), self.number("<Q")
        if kind in _SCALARS:
            self.skip(self._bounded(count * struct.calcsize(_SCALARS[kind])))
        elif kind == _STRING:
            self._bounded(count * 8)
            for _ in range(count):
                self.skip(self._bounded(self.number("<Q")))
        else:
            raise HeaderError(f"a list of values of the type {kind}")
        return count

    def _bounded(self, length: int) -> int:
        if length > MAX_HEADER_BYTES:
            raise HeaderError(
                f"a value of {length} bytes is announced; {MAX_HEADER_BYTES} is the most"
            )
        return length

    def _more(self, wanted: int) -> None:
        if self._read >= MAX_HEADER_BYTES:
            raise HeaderError(f"the header is longer than {MAX_HEADER_BYTES} bytes")
        chunk = self._source.read(self._name, self._read, max(READ_BYTES, wanted))
        if not chunk:
            raise HeaderError(f"ends within its header, after {self._read} bytes")
        self._held = self._held[self._at :] + chunk
        self._at = 0
        self._read += len(chunk)
