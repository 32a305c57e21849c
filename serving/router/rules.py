"""The rules that choose a variant, in their order.

Owns what each rule keeps of the variants that are left, and why; `RULES` is the order, and
`WORDS` what the reply header may say. Leaves running them, and who is ready, to `choose`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from serving.router.draw import pick, unit
from serving.router.gates import Gates
from serving.router.request import RouteRequest
from serving.router.settings import Allowed
from serving.router.table import ModelRoute, VariantRoute

Variants = tuple[VariantRoute, ...]
Kept = tuple[Variants, str]
"""What a rule left of the variants, never nothing, and why."""


class Load(NamedTuple):
    """What one variant has to do."""

    running: int
    """Requests that it answers or that wait for it, over all replicas."""
    ready: int
    """Replicas that take requests."""

    @property
    def per_replica(self) -> float:
        """Running requests of each ready replica, on average."""
        return self.running / max(1, self.ready)


NO_REPLICA = Load(0, 0)


class Case(NamedTuple):
    """One request before one model: all that a rule may look at."""

    model: ModelRoute
    request: RouteRequest
    loads: Mapping[str, Load]
    gates: Gates
    now: float
    """Seconds, of a clock that only goes forward."""
    key: str
    """What draws are made by: the same key, the same draw."""

    def load(self, route: VariantRoute) -> Load:
        """The variant's load; one that nothing is known of has no replica."""
        return self.loads.get(route.variant, NO_REPLICA)

    def holds(self, route: VariantRoute) -> bool:
        """Whether the variant's context holds prompt and answer, as far as they are known."""
        return route.holds(self.request.prompt_tokens, self.request.max_tokens)

    def overfilling(self, route: VariantRoute) -> float:
        """0 while a slot is free, else the running requests over the slots, 1 or more."""
        filled = self.load(route).per_replica / (route.max_num_seqs or math.inf)
        return filled if filled >= 1 else 0.0


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: its word, and what it does with the variants that are left."""

    word: str
    keep: Callable[[Case, Variants], Kept]


# --- what a request needs -------------------------------------------------------------------


def long_prompt(case: Case, among: Variants) -> Kept:
    """Variants whose context holds the request, and plain ones beyond the context limit."""
    prompt, limit = case.request.prompt_tokens, case.model.routing.context_tokens
    why = f"about {prompt} tokens of prompt"
    kept = tuple(route for route in among if case.holds(route))
    if not kept:
        return among, f"{why}, and no variant's context holds the request"
    if len(kept) < len(among):
        why = f"{why}, and a context that holds the answer too"
    if limit is None or prompt <= limit:
        return kept, why
    return _plain(kept, f"{why}, over {limit}")


def structured(case: Case, among: Variants) -> Kept:
    """Plain variants for an answer that is held to a grammar, where so configured."""
    if not case.request.structured:
        return among, "no grammar is asked for"
    return _guarded(case.model.routing.structured, among, "held to a grammar")


def tools(case: Case, among: Variants) -> Kept:
    """Plain variants for an answer that must call a tool, where so configured."""
    if not case.request.forced_tool:
        return among, "no tool call is forced"
    return _guarded(case.model.routing.tools, among, "must call a tool")


def _guarded(allowed: Allowed, among: Variants, why: str) -> Kept:
    return _plain(among, why) if allowed == "plain" else (among, f"{why}; any variant may")


# --- what is being tried out ----------------------------------------------------------------


def split(case: Case, among: Variants) -> Kept:
    """The request's arm, where it takes part in the study that runs on live traffic."""
    study = case.model.routing.split
    if study is None:
        return among, "no study runs"
    arms = {route.variant: route for route in among if route.variant in study.arms}
    if len(arms) < len(study.arms) or not all(case.load(arm).ready for arm in arms.values()):
        return among, f"not every arm of {study.study} could answer"
    if unit(case.key, f"share of {study.study}") >= study.share:
        return among, f"not in {study.study}, which takes {study.share:.3g} of the requests"
    arm = pick(dict.fromkeys(study.arms, 1), case.key, study.study)
    return (arms[arm],), f"an arm of {study.study}"


# --- what is fastest, and how traffic is shared out -----------------------------------------


def short_output(case: Case, among: Variants) -> Kept:
    """Plain variants for an answer too short for drafting to pay."""
    least, asked = case.model.routing.break_even_output_tokens, case.request.max_tokens
    if least is None:
        return among, "no break-even length is set"
    if asked is None or asked >= least:
        return among, f"max_tokens {asked or 'not given'}; drafting pays from {least}"
    return _plain(among, f"max_tokens {asked}, below {least}")


def category(case: Case, among: Variants) -> Kept:
    """The variant of the request's category; one that drafts still gives way to load."""
    name, by_category = case.request.category, case.model.routing.by_category
    if name is None or name not in by_category:
        return among, "no category" if name is None else f"no variant is set for {name!r}"
    wanted = by_category[name]
    if all(route.variant != wanted for route in among):
        return among, f"{name!r} wants {wanted}, which is not left"
    return _or_plain(case, wanted, among), f"{name!r} wants {wanted}"


def weight(case: Case, among: Variants) -> Kept:
    """One of the variants that share the traffic, the same for a session each time.

    What has no share is left beside it only where the rule of load still follows.
    """
    routing = case.model.routing
    shares = {
        route.variant: routing.weights[route.variant]
        for route in among
        if route.variant in routing.weights
    }
    if len(shares) < 2:
        return among, "no two variants share the traffic"
    drawn = pick(shares, case.key, case.model.id)
    kept = tuple(
        route
        for route in among
        if route.variant == drawn or (routing.crossover_streams and route.variant not in shares)
    )
    return kept, f"{drawn} of " + ", ".join(f"{name}: {n}" for name, n in shares.items())


def load(case: Case, among: Variants) -> Kept:
    """The first drafting variant below its crossover, else a plain one that has room."""
    routing = case.model.routing
    left = {route.variant: route for route in among}
    drafting: list[VariantRoute] = []
    seen: list[str] = []
    for name, crossover in routing.crossover_streams.items():
        if (route := left.get(name)) is None:
            continue
        drafting.append(route)
        most = min(crossover or math.inf, route.max_num_seqs or math.inf)
        level = _level(case, route)
        whose = name if routing.crossover_counts == "variant" else "the model"
        has = f"{whose} has {level:.3g} running per replica"
        if case.gates.is_open((case.model.id, name), level, most, routing, case.now):
            return (route,), "; ".join([*seen, f"{has}, open until {most:.3g}"])
        seen.append(f"{has}, closed until {routing.return_at * most:.3g}")
    if not drafting:
        return among, "no variant with a crossover is left"
    plain = [route for route in among if not route.drafts]
    # Where plain has no slot free, the emptier one: a queue costs more than a slow step.
    chosen = min([*plain, *drafting], key=case.overfilling)
    if chosen.drafts:
        seen.append("nothing plain has room")
    return (chosen,), "; ".join(seen)


def _level(case: Case, route: VariantRoute) -> float:
    """What is held against the crossover, per replica of the variant.

    On one device all variants' requests take its time: those that went plain are still load, and
    a variant that closed would open again as soon as they had left it.
    """
    own = case.load(route)
    if case.model.routing.crossover_counts == "variant":
        return own.per_replica
    return Load(sum(load.running for load in case.loads.values()), own.ready).per_replica


def _plain(among: Variants, why: str) -> Kept:
    plain = tuple(route for route in among if not route.drafts)
    return (plain, why) if plain else (among, f"{why}, but every variant left drafts")


def _or_plain(case: Case, wanted: str, among: Variants) -> Variants:
    """The wanted variant, and the plain ones where its crossover may yet send it there."""
    gives_way = wanted in case.model.routing.crossover_streams
    return tuple(
        route for route in among if route.variant == wanted or (gives_way and not route.drafts)
    )


RULES: tuple[Rule, ...] = (
    Rule("long-prompt", long_prompt),
    Rule("structured", structured),
    Rule("tools", tools),
    Rule("split", split),
    Rule("short-output", short_output),
    Rule("category", category),
    Rule("weight", weight),
    Rule("load", load),
)

# What a word says of the variant.
WORDS: dict[str, str] = {
    "explicit": "named after `@` in `model`",
    "header": "named in the header `x-moe-serving-variant`",
    "response": "the one that holds the response of `previous_response_id`",
    "long-prompt": "the one whose context holds the request, or plain for a prompt over the limit",
    "structured": "plain, since the answer is held to a grammar, which drafting has broken",
    "tools": "plain, since the answer must call a tool, which drafting has broken",
    "split": "the request's arm of an A/B study",
    "short-output": "plain, since `max_tokens` is below the length from which drafting pays",
    "category": "set for the request's category",
    "weight": "drawn by the weights; a session keeps it",
    "load": "drafting and below its crossover, or the one to go to above it",
    "default": "the study's best or the model's default one, since no rule had a say",
    "fallback": "ready, which the one that the rules chose is not",
}
