"""What a study measured, in the form that the router decides by.

Owns the schema of a policy file, which `moe-serving study export-policy` writes and
`serving.catalog.yaml_file.load_yaml` reads. Leaves deciding to the router.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from serving.catalog.errors import FieldError

Name = Annotated[str, Field(min_length=1)]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Measured(_Value):
    """Where the figures are from."""

    study: Name = Field(description="id of the study's run")
    gpu: Name = Field(description="GPU class, an id of configs/gpus")
    # strict=False here and below: a stack kept as JSON holds a policy, too.
    date: datetime.date = Field(strict=False, description="day the run ended, in UTC")
    versions: dict[str, str] = Field(description="machine, driver and versions")


class BestVariant(_Value):
    """The variant to use where nothing below says otherwise."""

    variant: Name
    speedup: float = Field(gt=0, description="decode tokens/s over plain's; 1 where plain is best")
    interval: tuple[float, float] | None = Field(
        strict=False, description="95 % interval of the speed-up; null where plain is best"
    )

    @model_validator(mode="after")
    def _interval_is_in_order(self) -> Self:
        if self.interval is not None and not 0 < self.interval[0] <= self.interval[1]:
            low, high = self.interval
            raise FieldError(f"found [{low}, {high}]; write [low, high], both above 0", "interval")
        return self


class Limits(_Value):
    """How far the measurements reach; beyond them the policy is a guess."""

    context_tokens: int = Field(ge=1, description="longest prompt and answer tried, in tokens")
    measured_tokens: int = Field(ge=1, description="output tokens that the figures rest on")


class Policy(_Value):
    """Which variant of a model to use, and until where."""

    schema_: Literal[1] = Field(alias="schema", description="version of this file's form")
    model: Name = Field(description="served model, its id in the stack file")
    measured: Measured = Field(description="where the figures are from")
    best: BestVariant = Field(description="fastest variant at few streams")
    crossover_streams: int | None = Field(
        ge=1, description="from this many running requests on, plain is faster; null: never seen"
    )
    break_even_output_tokens: int | None = Field(
        ge=1, description="for shorter answers plain is faster; null: never seen"
    )
    by_category: dict[Name, Name] = Field(description="variant by category of request")
    limits: Limits = Field(description="how far the measurements reach")
