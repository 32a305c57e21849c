"""The comparison itself: which stack, which arms, the rounds in their order.

Owns the order of ramps and what each asks. Leaves the stack's life to `stage`, the ramp to
`ramp`, and figures to `figures`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from serving.catalog.errors import ConfigError, Problem
from serving.router.settings import RoutingSpec
from serving.stack import history
from serving.stack.engine_plan import plan_engines
from serving.stack.load import load_stack
from serving.stack.spec import StackSpec
from serving.studies.client import Client, Request, prompt_request
from serving.studies.prompts import Prompt, new_salt, salted
from serving.studies.routing.figures import ARMS, DRAFTING, PLAIN, ROUTED
from serving.studies.routing.ramp import Shape, StepCount, run_ramp

SETTLE_S = 2.0
# A window this short holds a few answers of each stream.
LEAST_WINDOW_S = 2.0


@dataclass(frozen=True, slots=True)
class Contest:
    """A stack whose one model has a drafting variant, a plain one, and a router between them."""

    stack: StackSpec
    model: str
    drafting: str
    plain: str

    @property
    def routing(self) -> RoutingSpec:
        """The router's settings."""
        return self.stack.models[0].routing

    @property
    def crossover(self) -> int:
        """Running requests from which the router goes plain."""
        return self.routing.crossover_streams[self.drafting]

    @property
    def names(self) -> dict[str, str]:
        """What each arm asks for in `model`."""
        return {
            DRAFTING: f"{self.model}@{self.drafting}",
            PLAIN: f"{self.model}@{self.plain}",
            ROUTED: self.model,
        }


def contest(stack: str, crossover: int | None = None) -> Contest:
    """The contest of a stack file or a shipped stack's name, with this crossover if one is given.

    Raises ConfigError where its first model is not routed by load between two variants.
    """
    data = json.loads(history.to_json(load_stack(stack)))
    data["models"] = data["models"][:1]
    routing = data["models"][0].setdefault("routing", {})
    if routing.get("policy") != "load-aware" or len(routing.get("crossover_streams", {})) != 1:
        text = (
            "the model has no load-aware policy with one crossover; write one, as in routing-demo"
        )
        raise ConfigError((Problem(stack, 0, "models[0].routing", text),))
    if crossover is not None:
        routing["crossover_streams"] = dict.fromkeys(routing["crossover_streams"], crossover)
    spec = StackSpec.model_validate_json(json.dumps(data))
    plain = [plan.variant for plan in plan_engines(spec) if plan.speculative is None]
    if len(plain) != 1:
        text = f"found {len(plain)} plain variants; keep one to compare with"
        raise ConfigError((Problem(stack, 0, "models[0].variants", text),))
    [drafting] = routing["crossover_streams"]
    return Contest(spec, spec.models[0].id, drafting, plain[0])


def shape_of(streams: Sequence[int], rounds: int, minutes: float) -> Shape:
    """Steps as long as `minutes` of load allow, all rounds and arms together.

    Raises ValueError where too little would be left of a step.
    """
    ramps = len(ARMS) * rounds
    step_s = round(60 * minutes / (ramps * len(streams)), 2)
    if step_s < SETTLE_S + LEAST_WINDOW_S:
        least = (SETTLE_S + LEAST_WINDOW_S) * ramps * len(streams) / 60
        raise ValueError(
            f"minutes: found {minutes:g}, which leaves {step_s:.1f} s for each of {len(streams)} "
            f"steps in {ramps} ramps; give at least {least:.1f}, or fewer steps or rounds"
        )
    return Shape(tuple(streams), step_s, SETTLE_S)


async def run_rounds(
    contest: Contest,
    url: str,
    shape: Shape,
    rounds: int,
    prompts: Sequence[Prompt],
    max_tokens: int,
    report: Callable[[str], None],
) -> dict[str, list[list[StepCount]]]:
    """All ramps, the arms in turns; who begins changes from round to round."""
    found: dict[str, list[list[StepCount]]] = {arm: [] for arm in ARMS}
    material = _Material(prompts, max_tokens, secrets.randbits(64))
    async with Client(url) as client:
        await _warm_up(client, contest.names, shape, material)
        for number in range(rounds):
            turn = number % len(ARMS)
            for arm in (*ARMS[turn:], *ARMS[:turn]):
                request = material.asking(contest.names[arm], number)
                steps = await run_ramp(client, request, shape)
                found[arm].append(steps)
                told = " ".join(f"{each.tokens_per_s:.0f}" for each in steps)
                failures = sum(each.failures for each in steps)
                more = f", {failures} requests failed" if failures else ""
                report(f"round {number + 1} of {rounds}, {arm}: {told} tokens/s{more}")
    return found


async def _warm_up(
    client: Client, names: Mapping[str, str], shape: Shape, material: _Material
) -> None:
    """A step of the most streams for each engine: kernels are set up for every batch size."""
    for arm in (DRAFTING, PLAIN):
        full = Shape((max(shape.streams),), shape.step_s, settle_s=0.0)
        await run_ramp(client, material.asking(names[arm], -1), full)


@dataclass(frozen=True, slots=True)
class _Material:
    prompts: Sequence[Prompt]
    max_tokens: int
    salt_seed: int

    def asking(self, model: str, round_number: int) -> Callable[[int], Request]:
        """The requests of one ramp, by their number; the same for every arm of a round."""

        def request(number: int) -> Request:
            salt = new_salt(self.salt_seed, (round_number + 1) * 10**6 + number)
            prompt = salted(self.prompts[number % len(self.prompts)], salt)
            # Streams stay full: no answer ends early.
            return prompt_request(
                model, prompt, max_tokens=self.max_tokens, temperature=0, ignore_eos=True
            )

        return request
