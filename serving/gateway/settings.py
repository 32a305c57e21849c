"""What the gateway must know to work: limits, time-outs and the routing table.

Plain data, since it reaches the gateway as Serve's `user_config` and changes
while it runs.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from serving.router.table import RoutingTable


class GatewaySettings(BaseModel):
    """Times in seconds, sizes in bytes; the stack file's `gateway` block explains each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    table: RoutingTable = RoutingTable()
    max_body_bytes: int = 16 * 2**20
    request_timeout_s: float = 600.0
    connect_timeout_s: float = 5.0
    queue_timeout_s: float = 30.0
    keep_alive_s: float = 15.0
    cors_origins: tuple[str, ...] = ()
