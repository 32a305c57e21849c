"""The current stack and the one before it, as they were validated.

Owns two files of the state folder. A stack is kept as its validated values, not
as its file, so that going back does not depend on a file that has changed since.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from serving.stack import runtime
from serving.stack.spec import StackSpec


def current() -> StackSpec | None:
    """The stack that was last brought up or updated to."""
    return _read(_path("current"))


def previous() -> StackSpec | None:
    """The stack before the current one, or None where there was none in this run."""
    return _read(_path("previous"))


def begin(stack: StackSpec) -> None:
    """Note the first stack of a run."""
    _path("previous").unlink(missing_ok=True)
    _write("current", stack)


def advance(stack: StackSpec) -> None:
    """Note `stack` as the current one; what was current becomes the previous one."""
    if (before := current()) is not None:
        _write("previous", before)
    _write("current", stack)


def _path(which: str) -> Path:
    return runtime.home() / f"{which}-stack.json"


def _write(which: str, stack: StackSpec) -> None:
    runtime.write_file(_path(which), to_json(stack))


def to_json(stack: StackSpec) -> str:
    """A stack as JSON that `from_json` reads back.

    Only what was given: a default written out could break a rule between fields.
    """
    return stack.model_dump_json(by_alias=True, exclude_unset=True)


def from_json(text: str) -> StackSpec:
    """The stack of `to_json`."""
    return StackSpec.model_validate_json(text)


def _read(path: Path) -> StackSpec | None:
    try:
        return from_json(path.read_text())
    except (OSError, ValidationError):
        return None
