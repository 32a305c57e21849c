"""How Ray Serve balances between the replicas of one variant, by name.

Owns the names and what each looks at in a request. Leaves Serve's classes behind them to
`gateway.request_routers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from serving.router.request import RouteRequest, prompt_beginning

Balancing = Literal["power-of-two", "prefix-aware", "session-hash"]
# About 1,000 tokens; more of a prompt would cost each lease more and seldom decide.
PROMPT_CHARACTERS = 4_000


@dataclass(frozen=True, slots=True)
class Hint:
    """What Serve's request router looks at in a request; empty where its policy needs nothing.

    Serve finds `prompt` by this name on an argument of the call that takes a lease.
    """

    prompt: str = ""
    session: str = ""
    replica: str = ""
    """The only replica that can answer, for the gateway: no request router looks at it."""


def hint_of(
    balancing: Balancing, body: Mapping[str, Any], request: RouteRequest, replica: str = ""
) -> Hint:
    """The part of a parsed request that this policy decides by; `replica` as in `Hint`."""
    if balancing == "prefix-aware":
        return Hint(prompt=prompt_beginning(body, PROMPT_CHARACTERS), replica=replica)
    if balancing == "session-hash":
        return Hint(session=request.session or "", replica=replica)
    return Hint(replica=replica)
