"""What gateways and the bank of quota say to each other, and what the bank keeps in a store.

Values and Protocols only. A subject is a team or a key, named `team:<name>` or `key:<id>`. A
gateway is given units of a subject's limit: it *holds* them, whether they are taken by requests
or idle, and they are its own until it gives them back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from serving.teams.windows import LimitName

# How often a gateway reports, seconds.
BEAT_S = 0.5
# For how long a gateway may use what it holds without having reached the bank, seconds. A bank
# that is restarted on another node has to be back by then.
LEASE_S = 15.0
# The window of a limit without a calendar.
TIMELESS = 0.0
# No window: the gateway holds nothing of this budget yet.
UNKNOWN = -1.0


@dataclass(frozen=True, slots=True)
class Ask:
    """What a gateway says, and asks, of one limit of one subject. Units are the limit's."""

    limit: int
    window: float
    """Start of the period that this is about, Unix seconds; TIMELESS, or UNKNOWN."""
    held: int
    """Units held before `change`."""
    change: int
    """Below 0: idle units given back. Above 0: units taken that were not held; they are booked
    whatever the limit."""
    idle: int
    """Units held and not taken, after `change`."""
    need: int = 0
    """Units without which a request has to be refused."""
    want: int = 0
    """Units that would save further asking, `need` among them."""
    frees: tuple[tuple[float, int], ...] = ()
    """When taken units come back by themselves: in how many seconds, and how many."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the bank says of one limit of one subject."""

    given: int
    """Units lent; below the `need` asked for, none."""
    window: float
    """Start of the period they are for, Unix seconds; TIMELESS."""
    ends_in_s: float
    """Seconds until that period ends; infinite where none is."""
    free: int
    """Units that nobody takes, without those that the asking gateway holds."""
    recall: bool
    """Whether the gateway should give back what it does not use, at once."""
    coming: bool
    """Whether others hold idle units enough for the need; they were asked to give them back."""
    retry_after_s: float
    """When the need can be met at the earliest, if nothing is taken until then; seconds."""
    booked: bool = True
    """False: nothing could be lent, as the store cannot be written."""


@dataclass(frozen=True, slots=True)
class Report:
    """All that one gateway says of one subject."""

    subject: str
    number: int
    """Grows with every report of the gateway: an older one that comes late is not heard."""
    asks: Mapping[LimitName, Ask]


Answers = Mapping[LimitName, Answer]


class Lender(Protocol):
    """Who lends: the bank's actor, or the bank itself in a test."""

    async def exchange(self, gateway: str, reports: list[Report]) -> list[Answers]:
        """Take the reports of a gateway, and answer each; empty where one came too late.

        Raises anything where the lender cannot be reached.
        """


class Charge(NamedTuple):
    """What of a limit is lent and used up, as the store has it."""

    window: float
    """Start of the period, Unix seconds; TIMELESS where there is none."""
    used: int


class QuotaStore(Protocol):
    """Where the bank's state outlives it. Calls block; one at a time is made."""

    def load(self) -> Mapping[str, Charge]:
        """The charge of the latest window of each name."""

    def save(self, charges: Mapping[str, Charge]) -> None:
        """Write these, all or none; returns when they are safe. Other names stay as they are."""


@dataclass(frozen=True, slots=True)
class Usage:
    """How much of a limit is used, as of the gateways' last reports."""

    limit: int
    used: int


def charge_name(subject: str, limit: LimitName) -> str:
    """The name in the store of a subject's limit."""
    return f"{subject}/{limit}"
