"""An engine's command line as named values, for a checkpoint that no stack file describes.

Owns what vLLM's and llama.cpp's own parsers make of dashes, aliases, JSON and dotted
names. Leaves whether an argument exists to the engines.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from serving.checks.errors import CheckError
from serving.checks.versions import EngineName

_ALIASES: dict[EngineName, dict[str, str]] = {
    "vllm": {
        "tp": "tensor_parallel_size",
        "pp": "pipeline_parallel_size",
        "dp": "data_parallel_size",
        "sc": "speculative_config",
        "q": "quantization",
        "spec_method": "speculative_config.method",
        "spec_model": "speculative_config.model",
        "spec_tokens": "speculative_config.num_speculative_tokens",
    },
    "llama.cpp": {
        "np": "parallel",
        "md": "spec_draft_model",
        "model_draft": "spec_draft_model",
        "draft_max": "spec_draft_n_max",
        "draft": "spec_draft_n_max",
        "draft_n": "spec_draft_n_max",
    },
}
# Arguments whose value is a block.
BLOCKS = ("speculative_config", "kv_transfer_config", "compilation_config", "attention_config")


def parse_arguments(engine: EngineName, given: Sequence[str]) -> dict[str, Any]:
    """The options in `given`, by the engine's names with `_` for `-`.

    Raises CheckError for a word that belongs to no option and for a block that is
    no JSON object.
    """
    found: dict[str, Any] = {}
    words = list(given)
    while words:
        word = words.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if not _is_option(word):
            text = f"{word!r} belongs to no option; give the engine's options only, after --"
            raise CheckError(f"engine arguments: {text}", code="arguments")
        if equals:
            _put(engine, found, name, _value(value))
        elif words and not _is_option(words[0]):
            _put(engine, found, name, _value(words.pop(0)))
        else:
            _put(engine, found, name.removeprefix("no-"), not name.startswith("no-"))
    for name in BLOCKS:
        if not isinstance(found.get(name, {}), dict):
            text = f"--{name.replace('_', '-')}: found {found[name]!r}; write a JSON object"
            raise CheckError(f"engine arguments: {text}", code="arguments")
    return found


def _is_option(word: str) -> bool:
    return word.startswith("-") and word.strip("-") != "" and not word.lstrip("-")[0].isdigit()


def _put(engine: EngineName, found: dict[str, Any], name: str, value: Any) -> None:
    """Set an option; `block.key` sets a key of the block."""
    plain = name.replace("-", "_")
    path = _ALIASES[engine].get(plain, plain).split(".", 1)
    if len(path) == 1:
        found[path[0]] = value
        return
    block = found.setdefault(path[0], {})
    if isinstance(block, dict):
        block[path[1]] = value


def _value(text: str) -> Any:
    """A number, a truth value, a list or an object where it is JSON of one; else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
