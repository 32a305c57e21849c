"""Which replica holds a response that a later request may continue.

Owns the memory of one gateway process: response id to variant and replica, the oldest forgotten
first. The responses themselves are kept by vLLM, in the memory of the replica that gave them.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import NamedTuple

# Some 3 MB.
MOST_REMEMBERED = 10_000
# Both of a whole response and of a stream's first event, the id is the first one named so.
_ID = re.compile(rb'"id":\s*"([A-Za-z0-9._:-]{1,128})"')


class Kept(NamedTuple):
    """Where a response is."""

    variant: str
    replica: str


class KeptResponses:
    """The responses whose replica this gateway process knows."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()

    def note(self, model: str, kept: Kept, first: bytes) -> None:
        """Remember the response that begins with these bytes."""
        if found := _ID.search(first):
            self._kept[model, found[1].decode()] = kept
            if len(self._kept) > MOST_REMEMBERED:
                self._kept.popitem(last=False)

    def find(self, model: str, response_id: str | None) -> Kept | None:
        """Where this response of `model` is, as far as is known here."""
        key = (model, response_id or "")
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)
