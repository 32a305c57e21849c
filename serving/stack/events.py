"""What the driver process tells the command that started it, one JSON line each.

Owns the values on both sides of that pipe. Leaves their making to `driver` and
their showing to `progress`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

STARTING, READY, FAILED = "starting process", "ready", "failed"
WAITING, LOADING, DRAINING, ENDED = "waiting for resources", "loading", "draining", "ended"
UNFIT = "not fit to serve"
IDLE = "idle"
"""Scaled to zero: it loads for the next request."""


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Step(_Event):
    """A component has come to a step of its start or its end."""

    kind: Literal["step"] = "step"
    name: str
    """`model@variant`, `gateway`, or a part of the runtime."""
    step: str
    detail: str = ""


class Outcome(_Event):
    """The last event of an action that changed something: what was done, in a sentence."""

    kind: Literal["outcome"] = "outcome"
    text: str
    changed: bool = True


class Failure(_Event):
    """The last event of an action that failed; the text says what, why and the cure."""

    kind: Literal["failure"] = "failure"
    text: str
    refused: bool = False
    """Nothing was tried, so there is nothing to read in the log."""


class EngineStatus(_Event):
    """One variant of one model as Serve's controller sees it."""

    model: str
    variant: str
    default: bool
    app: str
    state: str
    running_replicas: int
    wanted_replicas: int
    starting_for_s: float | None = None
    """Seconds since the first of its starting replicas began; None where none is starting."""
    max_model_len: int
    speculative: dict[str, Any] | None
    message: str = ""


class Status(_Event):
    """Everything that runs; `applications` also names what is being drained."""

    kind: Literal["status"] = "status"
    stack: str
    engines: tuple[EngineStatus, ...]
    applications: dict[str, str]


class Request(_Event):
    """What the command sends the driver: Ray's address, and stacks as JSON."""

    address: str
    stack: str = ""
    before: str = ""
    """For a change: the stack that runs."""
    within_s: float = 0
    """For an end: what engines get to finish their requests, seconds."""
    temp: str = ""
    """Ray's folder, which holds the engines' own output."""


Event = Annotated[Step | Outcome | Failure | Status, Field(discriminator="kind")]
EVENT: TypeAdapter[Event] = TypeAdapter(Event)
