"""Acceptance from an engine's Prometheus counters, for servers that tell none per request.

Owns vLLM's names and the difference of two readings. It is the whole server's: what others
send meanwhile counts too.
"""

from __future__ import annotations

import re
from collections import defaultdict

from serving.studies.records import Drafting

# Ray renames `vllm:` to `ray_vllm_` or `vllm_`, and newer clients add `_total`.
SAMPLE = re.compile(
    r"^(?:ray_)?vllm[:_]spec_decode_num_"
    r"(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?"
    r"(?:\{(.*)\})? (\S+)",
    re.MULTILINE,
)
POSITION = re.compile(r'position="(\d+)"')

Counts = dict[str, float]


def read(exposition: str) -> Counts:
    """The drafting counters in a reply of `/metrics`, summed over engines."""
    counts: Counts = defaultdict(float)
    for name, labels, value in SAMPLE.findall(exposition):
        place = POSITION.search(labels)
        counts[f"{name}:{place[1]}" if place else name] += float(value)
    return dict(counts)


def between(before: Counts, after: Counts) -> Drafting | None:
    """What was drafted between two readings; None where nothing was."""
    grown = {name: int(after[name] - before.get(name, 0)) for name in after}
    if grown.get("draft_tokens", 0) <= 0:
        return None
    places = sorted(int(name.partition(":")[2]) for name in grown if ":" in name)
    return Drafting(
        drafts=grown["drafts"],
        drafted=grown["draft_tokens"],
        accepted=grown["accepted_tokens"],
        accepted_per_position=tuple(grown[f"accepted_tokens_per_pos:{place}"] for place in places)
        or None,
        source="counters",
    )
