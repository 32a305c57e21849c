"""Finding a stack file and reading it.

Owns what a user may write for STACK: a path, or the name of a shipped file.
Leaves the file's meaning to `spec` and the reading to `catalog.yaml_file`.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from serving.catalog import configs_dir
from serving.catalog.errors import ConfigError, Problem
from serving.catalog.yaml_file import load_yaml
from serving.stack.spec import StackSpec


def shipped_stacks() -> tuple[str, ...]:
    """The names of the shipped stack files, in order."""
    return tuple(sorted(path.stem for path in _stacks_dir().glob("*.yaml")))


def stack_path(path_or_name: str | Path) -> Path:
    """The file that a path or a shipped stack's name stands for; raises ConfigError."""
    path = Path(path_or_name)
    if path.is_file():
        return path
    name = str(path_or_name)
    if name in shipped_stacks():
        return _stacks_dir() / f"{name}.yaml"
    names = ", ".join(shipped_stacks())
    near = difflib.get_close_matches(path.stem, shipped_stacks(), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    text = f"no such stack file; {hint}give a path or one of {names}"
    raise ConfigError((Problem(name, 0, "", text),), code="no-stack")


def load_stack(path_or_name: str | Path) -> StackSpec:
    """The validated stack of a file or of a shipped name.

    Relative paths in the file are taken from its folder. Raises ConfigError with
    every problem, each with file, line and field.
    """
    return load_yaml(stack_path(path_or_name), StackSpec)


def _stacks_dir() -> Path:
    return configs_dir() / "stacks"
