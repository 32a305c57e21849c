"""What several programs of this folder take on their command lines."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable


def whole_number(least: int) -> Callable[[str], int]:
    """For argparse: reads a whole number from `least` on; raises ArgumentTypeError."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"found {text!r}; write a whole number from {least} on")
        return int(text)

    return read
