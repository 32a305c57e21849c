"""Which modules vLLM will expect quantised, by a checkpoint's own quantisation block.

Owns the reading of each exporter's list of exceptions, as vLLM 0.32.0 does it
(model_executor/layers/quantization: modelopt, compressed_tensors, auto_gptq, auto_awq,
inc, fp8). Leaves comparing it with the tensors to the rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

Format = Literal["bf16", "fp8", "nvfp4", "int4", "other"]
Json = Mapping[str, Any]
# Patterns come from strangers' files, and matching some takes forever. Those in use have fewer
# repeats, and none repeats a group.
MAX_PATTERN, MAX_REPEATS = 300, 4
MAX_DEPTH = 8


class _Unreadable(ValueError):
    """A pattern that is no regular expression, or one that is better not tried."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The quantisation block of config.json, or hf_quant_config.json."""

    method: str
    """As the file has it: modelopt, compressed-tensors, gptq, awq, auto-round, fp8; or empty."""
    block: Json

    @classmethod
    def of(cls, config: Json, modelopt: Json) -> Quantisation:
        """Of config.json, and of hf_quant_config.json ({} where there is none)."""
        text = config.get("text_config")
        nested = text.get("quantization_config") if isinstance(text, dict) else None
        for block in (config.get("quantization_config"), nested):
            if isinstance(block, dict):
                return cls(_text(block.get("quant_method")).lower(), block)
        block = modelopt.get("quantization")
        return cls("modelopt", block) if isinstance(block, dict) else cls("", {})

    @property
    def format(self) -> Format:
        """The number format of the weights, bf16 where nothing is quantised."""
        if not self.method:
            return "bf16"
        if self.method in ("gptq", "awq", "auto-round"):
            return "int4"
        named = " ".join(_leaves(self.block)).lower()
        if "nvfp4" in named:
            return "nvfp4"
        if self.method == "compressed-tensors":
            return _compressed_format(self.block)
        return "fp8" if "fp8" in f"{self.method} {named}" else "other"

    def expects_quantised(self, module: str) -> bool | None:
        """Whether vLLM builds `module` for quantised weights.

        None where it goes by the tensors, and where the block cannot be told.
        """
        if not self.method:
            return False
        read = _READERS.get(self.method)
        try:
            return None if read is None else read(self, module)
        except _Unreadable:
            return None

    def exempts(self, module: str) -> bool:
        """Whether modelopt's list of exceptions covers `module`."""
        given = _texts(self.block.get("ignore")) or _texts(self.block.get("exclude_modules"))
        return any(
            part in module or fnmatchcase(module, part) for each in given for part in _split(each)
        )


def _split(pattern: str) -> tuple[str, ...]:
    """`mtp*` stands for the module and all below it."""
    tree = len(pattern) > 1 and pattern[-1] == "*" and pattern[-2] != "."
    return (pattern[:-1], f"{pattern[:-1]}.*") if tree else (pattern,)


def _modelopt(q: Quantisation, module: str) -> bool:
    layers = q.block.get("quantized_layers")
    if isinstance(layers, dict):  # mixed precision lists what is quantised
        return module in layers or any(each.startswith(f"{module}.") for each in layers)
    if q.format == "nvfp4" and module == "mtp.fc":
        return False  # vLLM pull request 38832
    return not q.exempts(module)


def _compressed_tensors(q: Quantisation, module: str) -> bool:
    if any(_equal_or_regex(module, given) for given in _texts(q.block.get("ignore"))):
        return False
    groups = q.block.get("config_groups")
    blocks = groups.values() if isinstance(groups, dict) else ()
    targets = [
        each for block in blocks if isinstance(block, dict) for each in _texts(block.get("targets"))
    ]
    return any(target == "Linear" or _equal_or_regex(module, target) for target in targets)


def _gptq(q: Quantisation, module: str) -> bool | None:
    dynamic = q.block.get("dynamic")
    patterns = [_text(key) for key in dynamic] if isinstance(dynamic, dict) else []
    without = [key.removeprefix("-:") for key in patterns if key.startswith("-:")]
    if module != "mtp.fc" and any("mtp" in pattern for pattern in without):
        return False  # qwen3_5_mtp.py takes such a pattern for the whole of the MTP layers
    if any(_matches(pattern, module) for pattern in without):
        return False
    listed = _texts(q.block.get("modules_in_block_to_quantize"))
    return any(each in module for each in listed) if listed else None


def _awq(q: Quantisation, module: str) -> bool | None:
    listed = _texts(q.block.get("modules_to_not_convert"))
    return not any(each in module for each in listed) if listed else None


def _auto_round(q: Quantisation, module: str) -> bool:
    extra = q.block.get("extra_config")
    for key, given in extra.items() if isinstance(extra, dict) else ():
        named = key == module or module.endswith(f".{key}") or _searches(key, module)
        if named and isinstance(given, dict) and isinstance(given.get("bits"), int):
            return bool(given["bits"] < 16)
    blocks = q.block.get("block_name_to_quantize", q.block.get("to_quant_block_names"))
    names = blocks.split(",") if isinstance(blocks, str) else _texts(blocks)
    return any(module.startswith(name.strip()) for name in names) if names else True


def _fp8(q: Quantisation, module: str) -> bool:
    for key in ("ignored_layers", "modules_to_not_convert"):
        listed = _texts(q.block.get(key))
        if listed:
            if "experts" in module:
                return not any(module in each for each in listed if "experts" in each)
            return module not in listed
    return True


_READERS: dict[str, Callable[[Quantisation, str], bool | None]] = {
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "fp8": _fp8,
}


def _compressed_format(block: Json) -> Format:
    groups = block.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            bits, kind = weights.get("num_bits"), weights.get("type")
            if kind == "float":
                return "nvfp4" if bits == 4 else "fp8"
            return "int4" if bits == 4 else "other"
    return "other"


def _equal_or_regex(value: str, target: str) -> bool:
    return _matches(target[3:], value) if target.startswith("re:") else value == target


def _matches(pattern: str, value: str) -> bool:
    return _compiled(pattern).match(value) is not None


def _searches(pattern: str, value: str) -> bool:
    """Keys with a character of regular expressions are searched for, others are names."""
    if not set(pattern) & set("*+?^$()[]{}|\\"):
        return False
    return _compiled(pattern).search(value) is not None


def _compiled(pattern: str) -> re.Pattern[str]:
    repeats = sum(pattern.count(each) for each in "*+{")
    if len(pattern) > MAX_PATTERN or repeats > MAX_REPEATS or _REPEATED_GROUP.search(pattern):
        raise _Unreadable(pattern)
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        raise _Unreadable(pattern) from None


_REPEATED_GROUP = re.compile(r"\)[*+{]")


def _leaves(value: Any, depth: int = MAX_DEPTH) -> Iterator[str]:
    """Every text in nested JSON."""
    if isinstance(value, str):
        yield value
    elif depth and isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each, depth - 1)


def _texts(value: Any) -> list[str]:
    """The texts of a list, and of lists within it."""
    return [text for text in _leaves(value) if text] if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
