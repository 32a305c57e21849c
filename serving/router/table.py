"""The routing table: every name a request may ask for, and the variant behind it.

Owns names, and what of each model and variant the choice rests on; leaves choosing to
`choose`. Travels to the gateway as Serve's `user_config`, so it is plain data that
pydantic reads back.
"""

from __future__ import annotations

import difflib
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict

from serving.router.settings import Bounds, Routing


class UnknownModelError(LookupError):
    """A request names a model, alias or variant that this stack does not serve."""


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class VariantRoute(_Value):
    """One variant: the Serve application that runs it and what a client may know of it."""

    variant: str
    app_name: str
    max_model_len: int
    speculative: dict[str, Any] | None = None
    max_num_seqs: int | None = None
    """Requests that one replica decodes at once; None: not known, so it is never full."""
    slots: int = 1
    """Requests that one replica takes at once."""
    max_queued: int | None = None
    """Requests that may wait for it; None: some for each slot."""
    may_grow_to: int = 0
    """Replicas that Serve's autoscaling may have; 0: their number is fixed."""
    keeps_responses: bool = False
    """Whether its engine keeps responses for requests that continue them."""

    @property
    def drafts(self) -> bool:
        """Whether this variant drafts tokens; one that does not is plain."""
        return self.speculative is not None

    def holds(self, prompt_tokens: int, max_tokens: int | None) -> bool:
        """Whether its context holds prompt and answer, as far as they are known."""
        return prompt_tokens + (max_tokens or 0) <= self.max_model_len

    @property
    def draft_tokens(self) -> int | None:
        """Tokens drafted per step: 0 for a plain variant, None where its settings do not say."""
        if self.speculative is None:
            return 0
        tokens = self.speculative.get("num_speculative_tokens")
        return tokens if isinstance(tokens, int) else None


class ModelRoute(_Value):
    """One served model with its variants; `default_variant` answers where a request names none."""

    id: str
    aliases: tuple[str, ...] = ()
    default_variant: str
    variants: tuple[VariantRoute, ...]
    routing: Routing = Routing()
    limits: Bounds = Bounds()
    gpu: str = "cpu"
    """GPU class, an id of configs/gpus."""

    @property
    def keeps_responses(self) -> bool:
        """Whether one of its variants does."""
        return any(route.keeps_responses for route in self.variants)

    def variant(self, name: str) -> VariantRoute:
        """The variant of this name.

        Raises UnknownModelError naming the model's variants.
        """
        for route in self.variants:
            if route.variant == name:
                return route
        known = ", ".join(route.variant for route in self.variants)
        raise UnknownModelError(f"model {self.id!r} has no variant {name!r}; it has: {known}")


class RoutingTable(_Value):
    """All models of a stack."""

    models: tuple[ModelRoute, ...] = ()

    @cached_property
    def _by_name(self) -> dict[str, ModelRoute]:
        return {name: model for model in self.models for name in (model.id, *model.aliases)}

    def resolve(
        self, requested: str, variant: str | None = None
    ) -> tuple[ModelRoute, VariantRoute]:
        """The model and variant behind an id, an alias or `id@variant`, by name alone.

        `variant` (the request's header) wins over the model's default, `id@variant`
        over both. Raises UnknownModelError naming what this stack serves.
        """
        model = self.model(requested)
        _, separator, named_variant = requested.partition("@")
        return model, model.variant(
            named_variant if separator else variant or model.default_variant
        )

    def model(self, requested: str) -> ModelRoute:
        """The model behind an id, an alias or `id@variant`.

        Raises UnknownModelError naming what this stack serves.
        """
        name = requested.partition("@")[0]
        model = self._by_name.get(name)
        if model is None:
            near = difflib.get_close_matches(name, self._by_name, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            known = ", ".join(sorted(self._by_name)) or "none"
            raise UnknownModelError(
                f"the model {requested!r} is not served here{hint}; served: {known}"
            )
        return model

    def names(self) -> list[tuple[str, ModelRoute, VariantRoute]]:
        """Every name a client may send as `model`: ids and aliases, then each `id@variant`."""
        listed = []
        for model in self.models:
            default = model.variant(model.default_variant)
            listed += [(name, model, default) for name in (model.id, *model.aliases)]
            listed += [(f"{model.id}@{route.variant}", model, route) for route in model.variants]
        return listed
