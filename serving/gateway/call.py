"""One request on its way to one variant.

Owns what is known of it once the router has chosen, the headers an engine gets, and the names
of those that tell a client of the choice. Leaves sending it to `app`, repeating it to `shadow`
and recording it to `splits`.
"""

from __future__ import annotations

from dataclasses import dataclass

from serving.engines.keys import ENGINE_KEY_HEADER
from serving.engines.lease import LEASE_HEADER, Endpoint
from serving.gateway.request import Headers, forwarded
from serving.router.balancing import Hint
from serving.router.choose import Decision
from serving.router.request import RouteRequest
from serving.router.table import ModelRoute, VariantRoute
from serving.teams.caller import Caller
from serving.teams.metering import NOTHING, Asked

ROUTE_HEADER = "x-moe-serving-route"
REPLICA_HEADER = "x-moe-serving-replica"
OVERHEAD_HEADER = "x-moe-serving-overhead-ms"
RETRIES_HEADER = "x-moe-serving-retries"
FALLBACK_HEADER = "x-moe-serving-fallback"
# An answer whose request sets no limit is taken to be so long.
TOKENS_UNASKED = 512


@dataclass(frozen=True, slots=True)
class Call:
    """A request with the model and the variant that are to answer; `body` names the model by id."""

    path: str
    headers: Headers
    body: bytes
    request_id: str
    model: ModelRoute
    variant: VariantRoute
    asked: RouteRequest
    decision: Decision
    hint: Hint
    started: float
    """By `time.perf_counter`."""
    stream: bool = False
    caller: Caller | None = None
    """Whose key it carries, where keys are needed."""
    usage: Asked = NOTHING
    """What the engine was asked to tell of its tokens beyond the client's own request."""
    moved: bool = False
    """Whether it goes to another variant than the router chose."""

    @property
    def name(self) -> str:
        """Model and variant, as a client would ask for them."""
        return f"{self.model.id}@{self.variant.variant}"

    @property
    def tokens(self) -> int:
        """Estimated tokens of prompt and answer, at most what the variant's context holds."""
        answer = TOKENS_UNASKED if self.asked.max_tokens is None else self.asked.max_tokens
        return min(self.asked.prompt_tokens + answer, self.variant.max_model_len)

    def may_move_to(self, model: str) -> bool:
        """Whether the caller may be answered by the model of this id in place of its own."""
        return self.caller is None or self.caller.may_use(model)

    @property
    def labels(self) -> tuple[str, str]:
        """Model and variant, as metrics name them."""
        return self.model.id, self.variant.variant

    def engine_headers(self, endpoint: Endpoint, key: str) -> dict[str, str]:
        """What the engine gets beside the body."""
        return forwarded(self.headers) | {
            "content-type": "application/json",
            "x-request-id": self.request_id,
            LEASE_HEADER: endpoint.lease_id,
            ENGINE_KEY_HEADER: key,
        }
