"""Who else may answer a request, once the variant that was chosen cannot.

Owns the order and who is left out. Leaves finding out that a variant cannot answer, and how
often is tried, to the gateway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from serving.router.choose import Decision
from serving.router.request import RouteRequest
from serving.router.settings import External
from serving.router.table import ModelRoute, RoutingTable, VariantRoute


class Target(NamedTuple):
    """A variant of this stack."""

    model: ModelRoute
    variant: VariantRoute


def is_bound(decision: Decision) -> bool:
    """Whether only the chosen variant will do.

    So it is where the request names it, continues a response that it holds, or is
    part of a study, whose arm it would leave.
    """
    return decision.rule in ("explicit", "header", "response") or decision.arm is not None


def others(
    table: RoutingTable,
    chosen: Target,
    request: RouteRequest,
    ready: Callable[[VariantRoute], bool],
) -> Iterator[Target | External]:
    """The ready ones of the model's `fallback`, in order; without one, its other variants."""
    model = chosen.model
    named: tuple[str | External, ...] = model.routing.fallback or tuple(
        f"{model.id}@{route.variant}" for route in model.variants
    )
    for each in named:
        if isinstance(each, External):
            yield each
            continue
        target = Target(*table.resolve(each))
        if target.variant.app_name == chosen.variant.app_name or not ready(target.variant):
            continue
        if target.variant.holds(request.prompt_tokens, request.max_tokens):
            yield target
