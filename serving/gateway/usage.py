"""What an engine says of its own reply: tokens, and what was drafted for them.

Owns reading it from the end of a reply's bytes, whole or streamed, without parsing the rest.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Where vLLM puts both, whichever the API; a longer end has many tool calls or a whole answer.
TAIL_BYTES = 16 * 1024


class Usage(NamedTuple):
    """Counts of one reply; None where the engine does not tell."""

    prompt_tokens: int | None
    completion_tokens: int | None
    drafts: int | None
    """Steps that drafted."""
    drafted: int | None
    accepted: int | None


class Tail:
    """The last bytes of a reply as it goes by."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the body."""
        self._kept += chunk
        if len(self._kept) > 2 * TAIL_BYTES:
            del self._kept[:-TAIL_BYTES]

    def usage(self) -> Usage:
        """The counts that the reply ended with."""
        return Usage(
            prompt_tokens=self._last(b"prompt_tokens", b"input_tokens"),
            completion_tokens=self._last(b"completion_tokens", b"output_tokens"),
            drafts=self._last(b"num_spec_steps"),
            drafted=self._last(b"num_draft_tokens"),
            accepted=self._last(b"num_accepted_draft_tokens"),
        )

    def _last(self, *names: bytes) -> int | None:
        # In a model's own text the quotation marks are escaped.
        pattern = rb'(?<!\\)"(?:%s)":\s*(\d+)' % b"|".join(names)
        found = re.findall(pattern, self._kept)
        return int(found[-1]) if found else None
