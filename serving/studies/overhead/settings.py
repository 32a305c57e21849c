"""What is handed to the program that runs `ray.serve.llm`.

Owns the one value that crosses into that process; leaves its meaning to `ray_llm`.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class RayLlmSettings(BaseModel):
    """One model on one port; `temp` is the folder for Ray's sockets and logs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    port: int
    temp: str
    model_id: str
    source: str
    engine_kwargs: dict[str, Any]
    env: dict[str, str]
