"""The rules, by theme; `RULES` is the table of all of them.

Owns what goes wrong and how it is seen in facts. Leaves collecting the facts, asking
the rules and printing what they found to the rest of the room. A new rule is a
decorated function in one of these modules.
"""

from __future__ import annotations

from serving.checks.finding import Rule
from serving.checks.rules import (
    cache,
    drafting,
    files,
    floors,
    hardware,
    head,
    llamacpp,
    memory,
    parallel,
)

_MODULES = (files, head, drafting, cache, parallel, hardware, floors, memory, llamacpp)

RULES: tuple[Rule, ...] = tuple(
    sorted(
        (each for module in _MODULES for each in vars(module).values() if isinstance(each, Rule)),
        key=lambda each: each.code,
    )
)
