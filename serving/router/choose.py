"""Choosing the variant of a request: the rules in their order, and who is ready.

Owns the router's state (the gates of the drafting variants) and the decision with its
reasons. Leaves the rules to `rules`, and leasing, repeating and recording to the gateway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from serving.router.gates import Gates
from serving.router.request import RouteRequest
from serving.router.rules import RULES, Case, Load, Variants
from serving.router.table import ModelRoute, VariantRoute


class Step(NamedTuple):
    """What one rule left, and why."""

    rule: str
    kept: tuple[str, ...]
    why: str


class Decision(NamedTuple):
    """Which variant answers, and what else is to be done with the request."""

    variant: str
    rule: str
    """The last rule that ruled something out, a key of `rules.WORDS`."""
    steps: tuple[Step, ...]
    shadow: str | None = None
    """Variant that the request is repeated to; its answer is measured and dropped."""
    arm: str | None = None
    """Arm of the model's A/B study that this request is recorded under."""


class Router:
    """The choice of one gateway process. It may outlive routing tables, and keeps its gates.

    `random` gives numbers in [0, 1) for requests without a session and for shadows.
    """

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._gates = Gates()

    def choose(
        self, model: ModelRoute, request: RouteRequest, loads: Mapping[str, Load], now: float
    ) -> Decision:
        """The variant of `model` that answers `request`.

        `loads` by variant; one that is missing counts as not ready. `now` in seconds, of a
        clock that only goes forward. Raises UnknownModelError where the request names a
        variant that the model does not have.
        """
        if (asked := _asked(model, request) or _held(model, request)) is not None:
            return asked
        key = request.session or str(self._random())
        case = Case(model, request, loads, self._gates, now, key)
        chosen, rule, steps = _narrow(case, model.variants)
        if not case.load(chosen).ready:
            ready = tuple(r for r in model.variants if case.load(r).ready and case.holds(r))
            if ready:
                why = f"{chosen.variant} is not ready"
                chosen, rule = _narrow(case, ready)[0], "fallback"
                steps.append(Step(rule, (chosen.variant,), why))
        return Decision(
            variant=chosen.variant,
            rule=rule,
            steps=tuple(steps),
            shadow=self._shadow(case, chosen),
            arm=chosen.variant if rule == "split" else None,
        )

    def _shadow(self, case: Case, chosen: VariantRoute) -> str | None:
        """The variant to repeat the request to; never one whose slots others wait for."""
        shadow = case.model.routing.shadow
        if shadow is None or shadow.variant == chosen.variant:
            return None
        second = case.model.variant(shadow.variant)
        if not case.load(second).ready or case.overfilling(second):
            return None
        return shadow.variant if self._random() < shadow.share else None


def _asked(model: ModelRoute, request: RouteRequest) -> Decision | None:
    """What the request names itself, which always wins; raises UnknownModelError."""
    if request.variant is not None:
        name, word = request.variant, "explicit"
    elif request.header_variant is not None:
        name, word = request.header_variant, "header"
    else:
        return None
    model.variant(name)
    return Decision(name, word, (Step(word, (name,), "the request names it"),))


def _held(model: ModelRoute, request: RouteRequest) -> Decision | None:
    """The variant that holds what the request continues; no other one can answer it."""
    name = request.held_by
    if all(route.variant != name for route in model.variants) or name is None:
        return None
    why = f"it holds {request.previous_response}"
    return Decision(name, "response", (Step("response", (name,), why),))


def _narrow(case: Case, among: Variants) -> tuple[VariantRoute, str, list[Step]]:
    """What is left of the variants after all rules, the word of the last that ruled, the steps."""
    word, steps = "default", []
    names = tuple(route.variant for route in among)
    for rule in RULES:
        if len(among) == 1:
            break
        kept, why = rule.keep(case, among)
        if len(kept) < len(among):
            among, word = kept, rule.word
            names = tuple(route.variant for route in among)
        steps.append(Step(rule.word, names, why))
    chosen = _first(case.model, among)
    if len(among) > 1:
        steps.append(Step("default", (chosen.variant,), "of those left"))
    return chosen, word, steps


def _first(model: ModelRoute, among: Variants) -> VariantRoute:
    """The study's best, else the default variant, else a plain one, else the first."""
    for name in (model.routing.preferred, model.default_variant):
        for route in among:
            if route.variant == name:
                return route
    return next((route for route in among if not route.drafts), among[0])
