"""What is handed to the program of the deployed gateway, and what it tells.

Owns the values that cross between the processes; leaves their meaning to `deployed`.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DeployedSettings(_Value):
    """Where to listen, the mock engine, and places."""

    port: int
    """HAProxy's."""
    engine_url: str
    engine_socket: str
    temp: str
    """Folder of Ray's sockets and logs."""
    haproxy_folder: str
    """Where Serve writes HAProxy's configuration, in a folder that it names by the Ray node."""
    ports_file: str


class Ports(_Value):
    """The loopback port of each layer."""

    deployed: int
    """HAProxy's."""
    replica: int
    """The gateway replica's own, past HAProxy."""
