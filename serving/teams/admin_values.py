"""What the admin API takes and gives, as its OpenAPI document describes it.

Owns bounds of sizes and numbers. Leaves lists to `admin_pages`, errors to `admin_errors`, and
what is done to `admin_operations`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from serving.router.request import Priority
from serving.teams.accounts import LONGEST_S, OVERLAP_S, Key, KeyGrant, ModelId, NewKey, Price, Team
from serving.teams.admin_pages import AFTER, PageQuery, PageSize
from serving.teams.caller import KeyScope, Limits

# Every JSON reader has integers up to it exactly.
LARGEST = 2**53 - 1
MOST_MODELS = 100
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Count = Annotated[int, Field(gt=0, le=LARGEST)]
PerMillion = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
UnixTime = Annotated[float, Field(description="Unix seconds")]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


# --- teams -----------------------------------------------------------------------------------


class LimitsValue(_Value):
    """What may be used; null: without limit. Tokens are prompt and generated ones together."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrent_requests: Count | None = None
    tokens_per_day: Annotated[Count | None, Field(description="days of UTC")] = None
    tokens_per_month: Annotated[Count | None, Field(description="months of UTC")] = None

    def limits(self) -> Limits:
        """The same for the rest of the room."""
        return Limits(**self.model_dump())


TeamPriority = Annotated[
    Priority | None,
    Field(description="what the team's requests are waited for as; null: as each says"),
]


class TeamPatch(_Value):
    """What to change of a team: only what is given; null takes a limit or the priority away."""

    priority: TeamPriority = None
    limits: LimitsValue = LimitsValue()


class NewTeam(TeamPatch):
    """A team to make."""

    name: Name


class TeamValue(_Value):
    """A team."""

    name: str
    priority: TeamPriority
    limits: LimitsValue
    created: UnixTime

    @classmethod
    def of(cls, team: Team) -> TeamValue:
        """A team as the API gives it."""
        limits = LimitsValue(**team.limits.model_dump())
        return cls(name=team.name, priority=team.priority, limits=limits, created=team.created)


# --- keys ------------------------------------------------------------------------------------


class KeysQuery(PageQuery):
    """Which keys."""

    team: Name | None = None


class KeyRequest(_Value):
    """A key to make."""

    team: Name
    name: Name
    scopes: Annotated[list[KeyScope], Field(min_length=1, max_length=2)] = ["inference"]
    models: Annotated[
        list[ModelId] | None,
        Field(min_length=1, max_length=MOST_MODELS, description="ids; null: every model"),
    ] = None
    limits: LimitsValue = LimitsValue()
    expires_in_s: Annotated[int | None, Field(gt=0, le=LONGEST_S, description="null: never")] = None

    def grant(self) -> KeyGrant:
        """What the key is to be allowed."""
        return KeyGrant(
            scopes=frozenset(self.scopes),
            models=None if self.models is None else frozenset(self.models),
            limits=self.limits.limits(),
            expires_in_s=self.expires_in_s,
        )


class Rotation(_Value):
    """How a key is rotated."""

    overlap_s: Annotated[
        int, Field(ge=0, le=LONGEST_S, description="how long the old key stays valid")
    ] = int(OVERLAP_S)


class KeyValue(_Value):
    """A key as it is listed, without the key itself."""

    id: str
    team: str
    name: str
    state: Literal["live", "rotated", "revoked", "expired"]
    scopes: list[KeyScope]
    models: Annotated[list[str] | None, Field(description="ids; null: every model")]
    limits: LimitsValue
    created: UnixTime
    expires: UnixTime | None
    revoked_at: UnixTime | None
    replaced_by: Annotated[str | None, Field(description="id of the key it was rotated to")]


class NewKeyValue(KeyValue):
    """A key that was just made."""

    key: Annotated[str, Field(repr=False, description="the key itself; it is shown this once")]


def key_value(key: Key, now: float) -> KeyValue:
    """A key as the API gives it at `now`, Unix seconds."""
    return KeyValue(**_key_fields(key, now))


def new_key_value(new: NewKey, now: float) -> NewKeyValue:
    """A new key as the API gives it at `now`, Unix seconds."""
    return NewKeyValue(**_key_fields(new.key, now), key=new.text)


def _key_fields(key: Key, now: float) -> dict[str, Any]:
    return {
        "id": key.id,
        "team": key.team,
        "name": key.name,
        "state": key.state(now),
        "scopes": sorted(key.scopes),
        "models": None if key.models is None else sorted(key.models),
        "limits": LimitsValue(**key.limits.model_dump()),
        "created": key.created,
        "expires": key.expires,
        "revoked_at": key.revoked_at,
        "replaced_by": key.replaced_by,
    }


# --- prices, audit ---------------------------------------------------------------------------


class NewPrice(_Value):
    """What a million tokens of each kind are to cost, in the operator's own currency."""

    input: PerMillion
    output: PerMillion
    cached: Annotated[PerMillion | None, Field(description="null: as input")] = None

    def price(self) -> Price:
        """The same for the rest of the room."""
        cached = self.input if self.cached is None else self.cached
        return Price(input=self.input, cached=cached, output=self.output)


class PriceValue(_Value):
    """What a million tokens of a model cost."""

    model: str
    input: float
    cached: float
    output: float

    @classmethod
    def of(cls, model: str, price: Price) -> PriceValue:
        """A model's price as the API gives it."""
        return cls(model=model, **price.model_dump())


class AuditQuery(BaseModel):
    """Which part of the audit log."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    limit: PageSize = 100
    after: Annotated[int | None, Field(gt=0, le=LARGEST, description=AFTER)] = None


class AuditValue(_Value):
    """One administrative act."""

    id: int
    at: UnixTime
    actor: Annotated[str, Field(description="id of the key that asked, or local")]
    act: str
    subject: str
    detail: dict[str, Any]


# --- usage -----------------------------------------------------------------------------------


def _in_utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


By = Literal["day", "model", "key"]
Moment = Annotated[
    datetime,
    AfterValidator(_in_utc),
    Field(description="a day or a time in UTC, as 2026-01-31 or 2026-01-31T12:00:00Z"),
]


class OwnUsageQuery(PageQuery):
    """Which requests of the caller's team, and what to add them up by."""

    by: By = "day"
    since: Moment | None = None
    until: Annotated[Moment | None, Field(description="of this time, no request any more")] = None
    model: ModelId | None = None


class UsageQuery(OwnUsageQuery):
    """Which requests, and what to add them up by."""

    team: Name | None = None


class UsageValue(_Value):
    """What requests of one team used together."""

    team: str
    group: Annotated[str, Field(description="the day in UTC, the model or the key's id")]
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    draft_tokens: Annotated[int | None, Field(description="null: no engine told")]
    accepted_tokens: Annotated[int | None, Field(description="null: no engine told")]
    cost: Annotated[float | None, Field(description="null: no model had a price")]
