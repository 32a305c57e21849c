"""The `routing` block of a stack file, and what becomes of it for the gateway.

Owns the fields, the rules between them, and how a study's policy file fills them in.
Leaves what each setting does to `rules` and the file's form to `policy`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from serving.catalog.errors import ConfigError, FieldError
from serving.catalog.yaml_file import load_yaml
from serving.router.balancing import Balancing
from serving.router.policy import Policy

Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
# Whether requests of a kind are kept from drafting: `plain` takes a variant without it.
Allowed = Literal["plain", "any"]

# An id that is a folder's name, too.
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Bounds(_Value):
    """Requests at once, over all gateway processes."""

    running: Count | None = Field(default=None, description="that have a slot; absent: no bound")
    queued: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="that wait for one; absent: no bound"
    )


class Split(_Value):
    """An A/B study on live traffic."""

    study: str = Field(min_length=1, description="id of the study that the results are kept under")
    arms: tuple[str, ...] = Field(
        strict=False, min_length=2, description="variants compared, with equal shares"
    )
    share: Share = Field(description="part of the requests that takes part, up to 1")

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if not _FOLDER.fullmatch(self.study):
            text = f"found {self.study!r}, which names a folder; use letters, digits, . _ and -"
            raise FieldError(text, "study")
        if len(set(self.arms)) < len(self.arms):
            raise FieldError("an arm is named twice; name each variant once", "arms")
        return self


class Shadow(_Value):
    """Requests repeated to a second variant, whose answers are measured and dropped."""

    variant: str = Field(description="the second variant")
    share: Share = Field(description="part of the requests that is repeated, up to 1")


class External(_Value):
    """A model behind another OpenAI API, outside this stack."""

    url: str = Field(description="base URL, as clients of it write it: https://host/v1")
    model: str = Field(min_length=1, description="the name it has there")
    key_file: Path | None = Field(
        default=None, strict=False, description="file with its API key; absent: none is sent"
    )

    @field_validator("url")
    @classmethod
    def _is_base_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(f"found {url!r}; write a base URL, as https://host/v1")
        if parts.username or parts.password:
            raise ValueError("holds a password; put the key into a file and name it in key_file")
        return url

    @field_validator("key_file")
    @classmethod
    def _beside_the_stack(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        file = (info.context or {}).get("path")
        return path and (file.parent / path if file else path)

    @property
    def name(self) -> str:
        """What a reply's headers call it: the model and its host, without the rest of the URL."""
        return f"{self.model}@{urlsplit(self.url).hostname}"


def _kind(entry: object) -> str:
    return "outside" if isinstance(entry, dict | External) else "name"


# Told apart beforehand, so that a fault is told of what was meant.
Fallback = Annotated[
    Annotated[str, Tag("name")] | Annotated[External, Tag("outside")], Discriminator(_kind)
]


class _Choices(_Value):
    """What the file says and the gateway takes as it is."""

    return_at: float = Field(
        default=0.75, gt=0, lt=1, description="share of the crossover at which drafting is back"
    )
    dwell_s: float = Field(
        default=2.0, ge=0, description="seconds for which the load has to stay at that"
    )
    crossover_counts: Literal["variant", "model"] = Field(
        default="variant",
        description="running requests that are held against the crossover: the variant's own, or "
        "all of the model's, where its variants share one device",
    )
    break_even_output_tokens: Count | None = Field(
        default=None, description="requests with a lower max_tokens take a plain variant"
    )
    by_category: dict[str, str] = Field(
        default={}, description="variant by the header x-moe-serving-category"
    )
    context_tokens: Count | None = Field(
        default=None, description="longer prompts (estimated) take a plain variant"
    )
    weights: dict[str, Count] = Field(
        default={}, description="parts of the traffic by variant, as {plain: 95, canary: 5}"
    )
    split: Split | None = Field(default=None, description="an A/B study: study, arms, share")
    shadow: Shadow | None = Field(default=None, description="repeated requests: variant, share")
    fallback: tuple[Fallback, ...] = Field(
        strict=False,
        default=(),
        description="who answers when no replica can, in order: model@variant, model, or "
        "{url, model, key_file}; absent: the model's other variants",
    )
    balancing: Balancing = Field(
        default="power-of-two", description="between a variant's replicas: Serve's request router"
    )


class Routing(_Choices):
    """How a model's variant is chosen, with everything decided."""

    crossover_streams: dict[str, Count | None] = {}
    """Drafting variants in the order they are preferred; null: no crossover was seen."""
    preferred: str | None = None
    """The study's best variant, where one decides; else the model's default one."""
    structured: Allowed = "any"
    tools: Allowed = "any"


class RoutingSpec(_Choices):
    """The `routing` block of a model."""

    policy: Literal["static", "load-aware", "measured"] = Field(
        default="static", description="static, load-aware or measured"
    )
    file: Path | None = Field(
        default=None, description="policy file of `moe-serving study export-policy`"
    )
    measured: Policy | None = Field(default=None, description="such a file's content, in place")
    crossover_streams: dict[str, Count] = Field(
        default={}, description="by drafting variant: running requests per replica to go plain at"
    )
    structured: Allowed | None = Field(
        default=None, description="answers held to a grammar: plain, or any variant"
    )
    tools: Allowed | None = Field(
        default=None, description="answers that must call a tool: plain, or any variant"
    )

    @model_validator(mode="before")
    @classmethod
    def _read_file(cls, data: Any, info: ValidationInfo) -> Any:
        """The file's content in its name's place.

        Kept with the stack, so that a change of the file is a change of the stack, and
        going back to an earlier stack is going back to its figures.
        """
        if not isinstance(data, dict) or not isinstance(data.get("file"), str):
            return data
        if data.get("measured") is not None:
            raise FieldError("given beside measured; keep one of the two", "file")
        stack = (info.context or {}).get("path")
        file = Path(data["file"]) if stack is None else stack.parent / data["file"]
        try:
            policy = load_yaml(file, Policy)
        except ConfigError as error:
            more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
            raise FieldError(f"{error.problems[0]}{more}", "file") from None
        return {key: value for key, value in data.items() if key != "file"} | {"measured": policy}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.policy == "measured") != (self.measured is not None):
            if self.measured is None:
                text = "missing; name what `moe-serving study export-policy` wrote"
                raise FieldError(text, "file")
            raise FieldError(f"found {self.policy}, beside a file; write measured", "policy")
        if self.policy == "load-aware" and not self.crossover_streams:
            raise FieldError(
                "missing; write {variant: running requests per replica} as the study "
                "batch-crossover measures it, or take policy: measured",
                "crossover_streams",
            )
        for name in ("crossover_streams", "crossover_counts", "return_at", "dwell_s"):
            if self.policy == "static" and name in self.model_fields_set:
                raise FieldError("has no effect with policy: static; write load-aware", name)
        if len(self.weights) == 1:
            raise FieldError("one variant alone has no share; name the others too", "weights")
        return self

    def check(self, names: tuple[str, ...], drafting: Mapping[str, bool]) -> None:
        """Whether this fits a model of these names, with these variants; raises FieldError.

        `drafting` has every variant and whether it drafts.
        """
        for path, variant in self._variants_named():
            if variant not in drafting:
                known = ", ".join(drafting)
                raise FieldError(f"found {variant!r}; the variants are {known}", *path)
        for variant in self.crossover_streams:
            if not drafting[variant]:
                text = "does not draft, so it has no crossover; name a variant that does"
                raise FieldError(text, "crossover_streams", variant)
        if self.policy == "load-aware" and all(drafting.values()):
            text = "every variant drafts, so there is none to go to under load; add a plain one"
            raise FieldError(text, "policy")
        if self.measured is not None:
            self._check_measured(self.measured, names, drafting)
        ladder = self._ladder()
        for variant in self.weights:
            if ladder and drafting[variant] and variant not in ladder:
                text = f"drafts, but has no crossover; add crossover_streams: {{{variant}: ...}}"
                raise FieldError(text, "weights", variant)

    def _variants_named(self) -> list[tuple[tuple[str | int, ...], str]]:
        """Each variant that the block names, and where."""
        named: list[tuple[tuple[str | int, ...], str]] = []
        for block in ("crossover_streams", "weights"):
            named += [((block, name), name) for name in getattr(self, block)]
        named += [(("by_category", key), name) for key, name in self.by_category.items()]
        if self.split is not None:
            named += [(("split", "arms", i), name) for i, name in enumerate(self.split.arms)]
        if self.shadow is not None:
            named.append((("shadow", "variant"), self.shadow.variant))
        return named

    def _check_measured(
        self, policy: Policy, names: tuple[str, ...], drafting: Mapping[str, bool]
    ) -> None:
        if policy.model not in names:
            text = f"its model is {policy.model!r}; export a study of {names[0]!r}"
            raise FieldError(f"the policy does not fit: {text}", "file")
        for name in (policy.best.variant, *policy.by_category.values()):
            if name not in drafting:
                known = ", ".join(drafting)
                text = f"it names the variant {name!r}; the variants are {known}"
                raise FieldError(f"the policy does not fit: {text}", "file")

    def _ladder(self) -> dict[str, int | None]:
        """Crossover by drafting variant; the study's best first, then the lowest."""
        own = dict(sorted(self.crossover_streams.items(), key=lambda item: item[1]))
        policy = self.measured
        if policy is None or policy.best.interval is None:
            return {**own}
        return {policy.best.variant: policy.crossover_streams, **own}

    def resolve(self, *, experts: bool | None) -> Routing:
        """For the gateway: the policy's figures filled in, and the defaults that depend on it.

        `experts` tells whether the model is a mixture of experts; None: not known. Strict
        JSON lost more answers to drafting there, so only dense models may draft it unasked.
        """
        given = self.model_dump(include=set(_Choices.model_fields), exclude_unset=True)
        policy, filled = self.measured, {}
        if policy is not None:
            filled = {
                "break_even_output_tokens": policy.break_even_output_tokens,
                "by_category": policy.by_category,
                "context_tokens": policy.limits.context_tokens,
                "preferred": policy.best.variant,
            }
        unasked = "any" if experts is False else "plain"
        return Routing.model_validate(
            filled
            | given
            | {
                "crossover_streams": self._ladder(),
                "structured": self.structured or unasked,
                "tools": self.tools or unasked,
            }
        )
