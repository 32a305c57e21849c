"""One plan: a model on a machine, whether it fits, how fast it decodes, what drafting gains.

Owns what is asked and what is answered, as values. Leaves arithmetic to `memory` and
`speed`, what to do about it to `recommend`, showing it to `report`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from serving.catalog.gpus import GpuClass
from serving.catalog.models import ModelEntry
from serving.planner.acceptance import Acceptance
from serving.planner.constants import CONSTANTS, VLLM, EngineFamily
from serving.planner.errors import PlannerError
from serving.planner.machine import Machine, machine_of, runs_format
from serving.planner.memory import GIB, Engine, MemoryPlan, fit
from serving.planner.parameters import count_parameters
from serving.planner.precision import precision_of, size_error
from serving.planner.speed import Decode, Setup, Target, decode, first_token_time

DRAFT_TOKENS = tuple(range(7))
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_CONCURRENCY = 256
CPU = "cpu"
# Cards up to this size need vLLM's share raised and a small prefill step.
SMALL_CARD = 24 * GIB
UTILIZATION, SMALL_CARD_UTILIZATION, UNIFIED_UTILIZATION = 0.9, 0.93, 0.5
# Memory shared with the host; the recipe caps vLLM's share at half.
UNIFIED = frozenset({"gb10"})


@dataclass(frozen=True, slots=True)
class Request:
    """What a plan is asked for. Lengths in tokens."""

    model: ModelEntry
    gpu: GpuClass
    acceptance: Acceptance
    checkpoint: str
    cards: int = 1
    """Cards of one engine (tensor parallel)."""
    engines: int = 1
    """Engines that the machine's cards hold beside each other."""
    context: int = 32_768
    concurrency: int = 4
    prompt: int = 2_048
    answer: int = 512
    kv_dtype: str = "bfloat16"
    ssm_dtype: str | None = None
    prefix_caching: bool = False
    vision: bool = False
    utilization: float | None = None
    memory_gib: float | None = None
    """Of one card, where the class does not tell or tells another."""
    bandwidth: float | None = None
    """Bytes/s of one card, where the class does not tell."""
    family: EngineFamily = VLLM

    def __post_init__(self) -> None:
        for field in ("context", "concurrency", "prompt", "answer", "cards", "engines"):
            if getattr(self, field) < 1:
                raise PlannerError(f"{field}: found {getattr(self, field)}; give 1 or more")
        if self.context > self.model.max_context:
            raise PlannerError(
                f"context: found {self.context}; {self.model.id} takes {self.model.max_context} "
                "tokens, lower it"
            )
        # Fails early for an unknown checkpoint, and for one the card has no kernels for.
        precision = precision_of(self.model, self.checkpoint)
        if not runs_format(self.gpu, precision.bits["experts"]):
            raise PlannerError(
                f"checkpoint: {self.checkpoint} is {precision.name}, which {self.gpu.id} has no "
                "kernels for; choose another checkpoint"
            )
        if self.model.checkpoint(self.checkpoint).quantisation == "gguf":
            raise PlannerError(
                f"checkpoint: {self.checkpoint} is a GGUF file, which vLLM does not serve for "
                "these models; choose another checkpoint"
            )

    @property
    def machine(self) -> Machine:
        """The cards of one engine together."""
        return machine_of(self.gpu, self.cards, bandwidth=self.bandwidth)

    @property
    def memory(self) -> int | None:
        """Bytes of one card; None where not known."""
        gib = self.memory_gib or self.gpu.memory_gib
        return None if gib is None else int(gib * GIB)

    @property
    def share(self) -> float:
        """The share of a card's memory that the engine may use (gpu_memory_utilization)."""
        return self.utilization or usual_share(self.gpu, self.memory)

    @property
    def batched_tokens(self) -> int:
        """Tokens of a prefill step: vLLM's own default, smaller on small cards."""
        return 8_192 if self.memory is not None and self.memory >= 70 * GIB else 2_048

    @property
    def setup(self) -> Setup:
        """What the speed model is run with."""
        target = Target.of(self.model, precision_of(self.model, self.checkpoint))
        target = replace(target, kv_dtype=self.kv_dtype, ssm_dtype=self.ssm_dtype)
        return Setup(target, self.machine, self.family, CONSTANTS)

    @property
    def depth(self) -> int:
        """Tokens behind a request on average: its prompt and half of its answer."""
        return self.prompt + self.answer // 2

    @property
    def can_draft(self) -> bool:
        """Whether the checkpoint, as far as is known, holds something that drafts."""
        own = self.model.checkpoint(self.checkpoint).mtp_head is not False
        return self.setup.target.drafts and (own or self.model.draft is not None)

    def engine(self, draft_tokens: int) -> Engine:
        """What the memory of one engine depends on."""
        return Engine(
            architecture=self.model.architecture,
            precision=precision_of(self.model, self.checkpoint),
            draft_tokens=draft_tokens,
            context=self.context,
            concurrency=self.concurrency,
            tensor_parallel=self.cards,
            kv_dtype=self.kv_dtype,
            ssm_dtype=self.ssm_dtype,
            prefix_caching=self.prefix_caching,
            vision=self.vision,
            batched_tokens=self.batched_tokens,
            cuda=self.gpu.compute_capability is not None,
        )

    def memory_plan(self, draft_tokens: int) -> MemoryPlan:
        """One card's memory with n drafts."""
        return fit(self.engine(draft_tokens), self.memory, self.share)

    def decode(self, draft_tokens: int, concurrency: int | None = None) -> Decode:
        """Predicted decode speed with n drafts."""
        return decode(
            self.setup,
            draft_tokens,
            self.acceptance,
            concurrency=concurrency or self.concurrency,
            context=self.depth,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """One number of running requests: plain, and the n that decodes fastest."""

    concurrency: int
    plain: Decode
    best: Decode


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer. Every speed is a prediction."""

    request: Request
    size_error: float | None
    """Sum of the weights' parts over the published size, minus 1."""
    memory: tuple[MemoryPlan, ...]
    """By number of draft tokens, from 0."""
    speeds: tuple[Decode, ...]
    """At the asked concurrency, by number of draft tokens, from 0."""
    loads: tuple[Load, ...]
    first_token_s: float | None
    first_token_drafting_s: float | None
    crossover: int | None
    """Running requests from which on plain is at least as fast as `best`'s n; None: not up to
    MOST_CONCURRENCY."""

    @property
    def plain(self) -> Decode:
        """Without drafts."""
        return self.speeds[0]

    @property
    def best(self) -> Decode:
        """The n that decodes fastest at the asked concurrency."""
        return max(self.speeds, key=lambda each: each.tokens_per_s)

    @property
    def break_even_output(self) -> float | None:
        """Output tokens from which on the best n makes up for its slower prefill.

        (TTFT drafting - TTFT plain) / (TPOT plain - TPOT drafting). None where drafting
        never does, or nothing is known of the prefill.
        """
        first, later = self.first_token_s, self.first_token_drafting_s
        saved = 1 / self.plain.per_request - 1 / self.best.per_request
        if first is None or later is None or saved <= 0:
            return None
        return (later - first) / saved


def make_plan(request: Request) -> Plan:
    """Answer `request`; raises CatalogError where it makes no sense."""
    counts = DRAFT_TOKENS if request.can_draft else (0,)
    speeds = tuple(request.decode(n) for n in counts)
    best = max(speeds, key=lambda each: each.tokens_per_s).draft_tokens
    setup = request.setup
    checkpoint = request.model.checkpoint(request.checkpoint)
    return Plan(
        request=request,
        size_error=size_error(request.model, checkpoint, setup.target.precision),
        memory=tuple(request.memory_plan(n) for n in counts),
        speeds=speeds,
        loads=tuple(_load(request, counts, each) for each in CONCURRENCIES),
        first_token_s=first_token_time(setup, request.prompt, drafting=False),
        first_token_drafting_s=first_token_time(setup, request.prompt, drafting=True),
        crossover=crossover(request, best) if best else None,
    )


def crossover(request: Request, draft_tokens: int) -> int | None:
    """The fewest running requests with which n drafts are no faster than none."""
    for concurrency in range(1, MOST_CONCURRENCY + 1):
        if request.decode(draft_tokens, concurrency).speedup <= 1:
            return concurrency
    return None


def _load(request: Request, counts: Iterable[int], concurrency: int) -> Load:
    speeds = [request.decode(n, concurrency) for n in counts]
    return Load(concurrency, speeds[0], max(speeds, key=lambda each: each.tokens_per_s))


def usual_share(gpu: GpuClass, memory: int | None) -> float:
    """The share of a card's memory that an engine is usually given."""
    if gpu.id in UNIFIED:
        return UNIFIED_UTILIZATION
    small = memory is not None and memory <= SMALL_CARD
    return SMALL_CARD_UTILIZATION if small else UTILIZATION


def choose_checkpoint(model: ModelEntry, gpu: GpuClass, cards: int, memory: int | None) -> str:
    """The checkpoint to plan for where none is named; raises PlannerError where none runs.

    Of those that the class has kernels for: the one with an MTP head known to be there and
    with the most bits of those whose weights leave a fifth of the engine's share of the memory
    to everything else, else the smallest.
    """
    parameters = count_parameters(model.architecture)
    sizes = {
        key: precision_of(model, key).bytes_of(parameters).total
        for key, each in model.checkpoints.items()
        if each.quantisation != "gguf"
        and runs_format(gpu, precision_of(model, key).bits["experts"])
    }
    if not sizes:
        raise PlannerError(
            f"gpu: no checkpoint of {model.id} has kernels on {gpu.id}; choose another class"
        )
    room = None if memory is None else 0.8 * usual_share(gpu, memory) * memory * cards
    fitting = [key for key, size in sizes.items() if room is None or size <= room]
    if not fitting:
        return min(sizes, key=lambda key: sizes[key])
    return max(fitting, key=lambda key: (model.checkpoints[key].mtp_head is True, sizes[key]))
