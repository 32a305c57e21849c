"""The routing table: every name a request may ask for, and the variant behind it.

Owns names and the static choice. Travels to the gateway as Serve's
`user_config`, so it is plain data that pydantic reads back.
"""

from __future__ import annotations

import difflib
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict


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


class ModelRoute(_Value):
    """One served model with its variants; `default_variant` answers where a request names none."""

    id: str
    aliases: tuple[str, ...] = ()
    default_variant: str
    variants: tuple[VariantRoute, ...]

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
        """The model and variant behind an id, an alias or `id@variant`.

        `variant` (the request's header) wins over the model's default, `id@variant`
        over both. Raises UnknownModelError naming what this stack serves.
        """
        name, separator, named_variant = requested.partition("@")
        model = self._by_name.get(name)
        if model is None:
            near = difflib.get_close_matches(name, self._by_name, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            known = ", ".join(sorted(self._by_name)) or "none"
            raise UnknownModelError(
                f"the model {requested!r} is not served here{hint}; served: {known}"
            )
        return model, model.variant(
            named_variant if separator else variant or model.default_variant
        )

    def names(self) -> list[tuple[str, ModelRoute, VariantRoute]]:
        """Every name a client may send as `model`: ids and aliases, then each `id@variant`."""
        listed = []
        for model in self.models:
            default = model.variant(model.default_variant)
            listed += [(name, model, default) for name in (model.id, *model.aliases)]
            listed += [(f"{model.id}@{route.variant}", model, route) for route in model.variants]
        return listed
