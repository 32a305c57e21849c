"""Who sends a request: the values that keys, limits and the ledger share.

Plain values; where they come from is `accounts`' business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

from serving.router.request import Priority

KeyScope = Literal["inference", "admin"]


class Limits(BaseModel):
    """What a team or a key may use; None where it is not limited.

    Tokens are prompt and generated tokens together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    concurrent_requests: PositiveInt | None = None
    tokens_per_day: PositiveInt | None = None
    tokens_per_month: PositiveInt | None = None


UNLIMITED = Limits()


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose key a request carries, and what it may do."""

    team: str
    key_id: str
    scopes: frozenset[KeyScope]
    models: frozenset[str] | None
    """Ids of the models the key may use; None: all."""
    priority: Priority | None
    """What the team's requests are waited for as; None: as each request says."""
    team_limits: Limits = UNLIMITED
    key_limits: Limits = UNLIMITED

    def may_use(self, model: str) -> bool:
        """Whether the key may use the model of this id."""
        return self.models is None or model in self.models
