"""One way to hold or turn signals for the length of a block."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


@contextlib.contextmanager
def handled(kinds: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    """Give the signals `kinds` to `handler`, and afterwards to whoever had them before."""
    before = [signal.signal(kind, handler) for kind in kinds]
    try:
        yield
    finally:
        for kind, previous in zip(kinds, before, strict=True):
            signal.signal(kind, previous)
