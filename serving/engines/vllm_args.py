"""The names of vLLM's arguments, read from the installed vLLM.

Owns finding out which names vLLM takes. Leaves their values to vLLM itself, and
which names a stack file may not use to `serving.stack.settings`.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path

# Where vLLM 0.32 declares them: the engine's arguments and its API server's.
_SOURCES = {
    "engine/arg_utils.py": ("EngineArgs", "AsyncEngineArgs"),
    "entrypoints/launchers/cli_args.py": ("BaseFrontendArgs", "FrontendArgs"),
}


def check_engine_args(names: Iterable[str]) -> dict[str, str]:
    """The names that vLLM does not take, each with its cure; {} where vLLM is not installed."""
    known = argument_names()
    if not known:
        return {}
    return {name: _cure(name, known) for name in names if name not in known}


@cache
def argument_names() -> frozenset[str]:
    """Every argument of vLLM's engine and API server; empty where vLLM is not installed.

    Read from the source: importing vLLM takes some ten seconds, too long for
    checking a file.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return frozenset()
    names: set[str] = set()
    for source, classes in _SOURCES.items():
        path = Path(spec.origin).parent / source
        if not path.is_file():
            return frozenset()  # another layout than 0.32's: vLLM itself checks at start
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                names |= _fields(node)
    return frozenset(names)


def _fields(node: ast.ClassDef) -> set[str]:
    """Names of a dataclass's fields, private ones left out."""
    targets = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def _cure(name: str, known: frozenset[str]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), sorted(known), n=1)
    if near:
        return f"did you mean {near[0]}?"
    return "vLLM has no such argument; see `vllm serve --help`, with _ for -"
