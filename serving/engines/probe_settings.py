"""Which probes an engine is put to: decided by the stack, read in the replica.

Owns the value and how it travels, in the replica's environment. Leaves the questions to `probes`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

VARIABLE = "MOE_SERVING_PROBES"


@dataclass(frozen=True, slots=True)
class Probes:
    """Which probes run, and their limits; by default none."""

    acceptance: bool = False
    prefix: bool = False
    tools: bool = False
    long_context_tokens: int | None = None
    drafts: int = 200
    """Drafts looked at by each acceptance probe, at least."""
    min_acceptance: float = 0.1
    within_s: float = 120.0
    """For all of them together."""
    on_collapse: Literal["warn", "drain"] = "warn"
    """What follows when acceptance collapses while the engine runs."""

    def to_environment(self) -> dict[str, str]:
        """The environment that carries this value; empty for the default."""
        return {} if self == Probes() else {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Probes:
        """The value that `to_environment` put there."""
        return cls(**json.loads(environment.get(VARIABLE, "{}")))
