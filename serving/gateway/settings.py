"""What the gateway must know to work: limits, time-outs and the routing table.

Plain data, since it reaches the gateway as Serve's `user_config` and changes
while it runs.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from serving.router.settings import Bounds
from serving.router.table import RoutingTable


class GatewaySettings(BaseModel):
    """Times in seconds, sizes in bytes; the stack file's `gateway` block explains each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    table: RoutingTable = RoutingTable()
    max_body_bytes: int = 16 * 2**20
    max_ongoing_requests: int = 1024
    request_timeout_s: float = 600.0
    connect_timeout_s: float = 5.0
    queue_timeout_s: float = 30.0
    wake_timeout_s: float = 300.0
    first_byte_timeout_s: float = 300.0
    between_bytes_timeout_s: float = 120.0
    keep_alive_s: float = 15.0
    limits: Bounds = Bounds()
    cors_origins: tuple[str, ...] = ()
    gateways: int = 1
    """Gateway processes that share the load."""
    keys: bool = False
    """Whether a request needs an API key."""
    home: Path = Path()
    """The stack's state folder: A/B studies on live traffic, the ledger's spool, SQLite."""

    @property
    def splits(self) -> Path:
        """Folder below which the A/B studies on live traffic are recorded."""
        return self.home / "splits"
