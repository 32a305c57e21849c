"""One checkpoint, read: its configuration, its tensors and what is wrong with its files.

Owns reading a source into facts. A file that is damaged is a fact too, not an error.
Leaves where bytes come from to the sources, and judging the facts to the rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from serving.checks import gguf_header, safetensors_header
from serving.checks.config import ModelConfig
from serving.checks.errors import CheckError
from serving.checks.gguf_header import GgufHeader
from serving.checks.quantisation import Quantisation
from serving.checks.safetensors_header import HeaderError, Tensor
from serving.checks.source import MAX_JSON_BYTES, CheckpointSource

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
# Headers are a few kB each: it is the round trips to a hub that take time.
READERS = 16

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a checkpoint holds; `place` is what the engine is told."""

    place: str
    files: frozenset[str] = frozenset()
    all_files: bool = True
    """False for a cache, where a file that is missing may still be fetched."""
    config: ModelConfig = field(default_factory=lambda: ModelConfig.of({}))
    quantisation: Quantisation = field(default_factory=lambda: Quantisation.of({}, {}))
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    index: Mapping[str, str] | None = None
    """The file of each tensor, as the index says; None where there is no index."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """What is wrong with a file, by its name."""
    chat_template: bool = False
    gguf: GgufHeader | None = None

    @property
    def complete(self) -> bool:
        """Whether every weight file could be read, so that a missing tensor is missing."""
        broken = any(name.endswith((".safetensors", ".gguf", INDEX)) for name in self.faults)
        return bool(self.tensors or self.gguf) and not broken and not self.missing_files

    @property
    def unlisted_files(self) -> tuple[str, ...]:
        """Weight files that the index does not name, and that vLLM therefore leaves out."""
        if self.index is None:
            return ()
        return tuple(sorted(set(_unindexed(self.files)) - set(self.index.values())))

    @property
    def missing_files(self) -> tuple[str, ...]:
        """Weight files that the index names and the folder lacks."""
        return tuple(sorted(set((self.index or {}).values()) - self.files))


def read_checkpoint(source: CheckpointSource) -> Checkpoint:
    """The folder's safetensors checkpoint; raises CheckError where it cannot be read at all."""
    files = frozenset(source.sizes)
    if CONFIG not in files and not any(name.endswith(".safetensors") for name in files):
        cure = "name the folder with config.json and the weights"
        raise CheckError(f"{source.place}: neither config.json nor safetensors there; {cure}")
    faults: dict[str, str] = {}
    config = _json(source, CONFIG, faults)
    index = _index(source, faults)
    shards = sorted(set(index.values()) & files) if index is not None else _unindexed(files)
    tensors: dict[str, Tensor] = {}
    for name, header in zip(shards, _headers(source, shards), strict=True):
        if isinstance(header, str):
            faults[name] = header
        else:
            tensors.update(header)
    return Checkpoint(
        place=source.place,
        files=files,
        config=ModelConfig.of(config),
        quantisation=Quantisation.of(config, _optional(source, "hf_quant_config.json", faults)),
        tensors=tensors,
        index=index,
        faults=faults,
        chat_template=_has_template(source, files, faults),
    )


def read_gguf(source: CheckpointSource, name: str) -> Checkpoint:
    """The GGUF file `name`, with the other parts where it is split; raises CheckError."""
    parts = [each for each in _parts(name) if each in source.sizes]
    faults = {each: "is missing" for each in _parts(name) if each not in source.sizes}
    headers = []
    for part in parts:
        try:
            headers.append(gguf_header.read_header(source, part))
        except HeaderError as error:
            faults[part] = str(error)
    metadata = headers[0].metadata if headers else {}
    tensors = frozenset[str]().union(*(header.tensors for header in headers))
    return Checkpoint(
        place=source.place,
        files=frozenset(source.sizes),
        faults=faults,
        chat_template="tokenizer.chat_template" in metadata,
        gguf=GgufHeader(metadata, tensors) if headers else None,
    )


def _parts(name: str) -> list[str]:
    split = _SPLIT.fullmatch(name)
    if split is None:
        return [name]
    stem, _, count = split.groups()
    return [f"{stem}-{part:05}-of-{count}.gguf" for part in range(1, min(int(count), 1000) + 1)]


def _headers(source: CheckpointSource, names: list[str]) -> Iterable[dict[str, Tensor] | str]:
    """Each file's tensors, or what is wrong with the file."""

    def read(name: str) -> dict[str, Tensor] | str:
        try:
            return safetensors_header.read_header(source, name)
        except HeaderError as error:
            return str(error)

    return _in_parallel(read, names)


def _in_parallel(work: Callable[[str], Result], names: list[str]) -> list[Result]:
    with ThreadPoolExecutor(max_workers=READERS) as pool:
        waiting = [pool.submit(work, name) for name in names]
        try:
            return [each.result() for each in waiting]
        except BaseException:
            # A hub that does not answer would be asked for every other file in turn.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _unindexed(files: Iterable[str]) -> list[str]:
    """The weights where no index names them; vLLM then reads every one of the folder."""
    return sorted(name for name in files if name.endswith(".safetensors") and "/" not in name)


def _index(source: CheckpointSource, faults: dict[str, str]) -> Mapping[str, str] | None:
    if INDEX not in source.sizes:
        return None
    found = _json(source, INDEX, faults).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        faults.setdefault(INDEX, "has no weight_map from tensors to files")
        return None
    return found


def _has_template(source: CheckpointSource, files: frozenset[str], faults: dict[str, str]) -> bool:
    if files & {"chat_template.jinja", "chat_template.json"}:
        return True
    return bool(_optional(source, "tokenizer_config.json", faults).get("chat_template"))


def _optional(source: CheckpointSource, name: str, faults: dict[str, str]) -> dict[str, Any]:
    return _json(source, name, faults) if name in source.sizes else {}


def _json(source: CheckpointSource, name: str, faults: dict[str, str]) -> dict[str, Any]:
    """The object in a JSON file; {} with a fault where there is none."""
    size = source.sizes.get(name)
    if size is None:
        faults[name] = "is missing"
        return {}
    if size > MAX_JSON_BYTES:
        faults[name] = f"holds {size} bytes; {MAX_JSON_BYTES} is the most that is read"
        return {}
    try:
        found = json.loads(source.read(name, 0, size))
    except (ValueError, RecursionError):
        faults[name] = "is not JSON"
        return {}
    if not isinstance(found, dict):
        faults[name] = "is no JSON object"
        return {}
    return found
