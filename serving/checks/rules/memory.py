"""Rules about memory: MTP601 to MTP619.

The arithmetic is the planner's: states, pages and blocks exact, activations and CUDA
graphs estimated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from serving.catalog.models import KV_DTYPE_BYTES
from serving.checks.facts import Facts, Machine
from serving.checks.finding import BY_DESIGN, Severity, rule
from serving.checks.rules.wording import gib
from serving.checks.versions import ANY, vllm
from serving.planner.errors import PlannerError
from serving.planner.memory import GIB, Engine, MemoryPlan, fit

# vLLM's own default (0.32, config/cache.py).
UTILISATION = 0.92


def memory_plan(facts: Facts, context: int | None = None) -> MemoryPlan | None:
    """What one card of the engine holds; None where card, weights or lengths are not known.

    `context` is the engine's longest request where it is not given.
    """
    a, precision = facts.architecture, facts.precision
    context = facts.context if context is None else context
    kv_dtype = "bfloat16" if facts.kv_dtype == "auto" else facts.kv_dtype
    if a is None or precision is None or facts.gpu is None or context < 1:
        return None
    if facts.number("pipeline_parallel_size", 1) > 1 or kv_dtype not in KV_DTYPE_BYTES:
        return None
    share = facts.args.get("gpu_memory_utilization", UTILISATION)
    size = facts.gpu.memory_gib
    ssm_dtype = facts.text("mamba_ssm_cache_dtype")
    try:
        engine = Engine(
            architecture=a,
            precision=precision,
            draft_tokens=facts.draft_tokens if facts.own_head else 0,
            context=context,
            concurrency=facts.max_num_seqs,
            tensor_parallel=facts.tensor_parallel,
            kv_dtype=kv_dtype,
            ssm_dtype=None if ssm_dtype in ("", "auto") else ssm_dtype,
            prefix_caching=facts.prefix_caching,
            vision=facts.args.get("language_model_only") is not True and a.vision,
            batched_tokens=facts.batched_tokens,
            cuda=facts.sm is not None,
        )
        memory = None if size is None else int(size * GIB)
        return fit(engine, memory, share if isinstance(share, int | float) else UTILISATION)
    except PlannerError:
        return None


@rule(
    "MTP601",
    "max_num_seqs exceeds the hybrid blocks",
    Severity.ERROR,
    effect="The engine does not start: every request needs a block for its state, and CUDA graphs "
    "are captured for all of them.",
    cure="Lower max_num_seqs to that number or less.",
    thread="vllm-project/recipes#831; vLLM 0.32.0, config/compilation.py",
    versions=vllm(since="0.17"),
    status=BY_DESIGN,
)
def more_requests_than_blocks(facts: Facts) -> Iterator[str]:
    """On GPUs, for models with GDN layers."""
    plan = memory_plan(facts) if facts.hybrid and facts.sm is not None else None
    if plan is not None and plan.blocks is not None and facts.max_num_seqs > plan.blocks:
        yield (
            f"max_num_seqs is {facts.max_num_seqs}, but about {plan.blocks} blocks of "
            f"{plan.cache.block_tokens} tokens fit beside {gib(plan.fixed)}"
        )


@rule(
    "MTP602",
    "the weights do not fit the card while they load",
    Severity.ERROR,
    effect="The engine runs out of memory while it loads.",
    cure="Choose a smaller quantisation, more cards, or no drafting.",
    thread="vllm-project/vllm#53887; noonghunna/club-3090#613",
    versions=vllm(),
)
def does_not_load(facts: Facts) -> Iterator[str]:
    """The drafter's own copies of both vocabulary tables included; no cache is there yet."""
    plan = memory_plan(facts, context=1)
    if plan is None or plan.loads is not False or plan.memory is None:
        return
    copies = f", {gib(plan.load_transient)} of it for the drafter's copies of the vocabulary tables"
    yield (
        f"loading takes {gib(plan.load_peak)}{copies if plan.load_transient else ''}; "
        f"the card has {gib(plan.memory)}"
    )


@rule(
    "MTP603",
    "not one request of full length fits",
    Severity.ERROR,
    effect="The engine does not start: the KV cache is too small for max_model_len.",
    cure="Lower max_model_len or num_speculative_tokens, take mamba_ssm_cache_dtype: float16, or a "
    "smaller quantisation.",
    thread="vLLM 0.32.0, v1/core/kv_cache_utils.py",
    versions=vllm(),
    status=BY_DESIGN,
)
def no_full_request(facts: Facts) -> Iterator[str]:
    """Weights, graphs, activations and runtime aside."""
    plan = memory_plan(facts)
    if plan is None or plan.blocks is None or plan.budget is None or plan.loads is False:
        return
    need = plan.cache.blocks(plan.context)
    if need > plan.blocks:
        room = max(0, plan.budget - plan.fixed)
        yield (
            f"{plan.context} tokens take {gib(need * plan.cache.block_bytes)}; {gib(room)} "
            f"of the engine's {gib(plan.budget)} are left beside {gib(plan.fixed)}"
        )


@rule(
    "MTP604",
    "not every request of full length fits",
    Severity.NOTE,
    effect="With long requests fewer run at once than max_num_seqs says; the others wait.",
    cure="Nothing to do where requests are shorter; else lower max_num_seqs, or max_model_len.",
    thread="docs/planner.md",
    versions=vllm(),
    status=BY_DESIGN,
)
def fewer_at_once(facts: Facts) -> Iterator[str]:
    """By the planner's count."""
    plan = memory_plan(facts)
    if plan is None or not plan.largest_concurrency:
        return
    if plan.largest_concurrency < plan.concurrency:
        yield (
            f"about {plan.largest_concurrency} requests of {plan.context} tokens at once; "
            f"max_num_seqs is {plan.concurrency}"
        )


@rule(
    "MTP605",
    "the engines do not share one card",
    Severity.NOTE,
    effect="Every variant is an engine with its own copy of the weights, on cards of its own.",
    cure="Have as many cards, or keep one variant.",
    thread="docs/stack-file.md",
    versions=ANY,
    status=BY_DESIGN,
    whole_stack=True,
)
def cards_together(stack: tuple[Facts, ...], _: Machine) -> Iterator[str]:
    """What each engine needs at least, summed as if one card had to hold them all."""
    for gpu, engines in _by_gpu(stack).items():
        each = _least(engines)
        size = engines[0].gpu.memory_gib if engines[0].gpu else None
        if each is None or size is None or len(engines) < 2 or sum(each.values()) <= size * GIB:
            continue
        cards = sum(engine.cards * engine.replicas for engine in engines)
        yield (
            f"{cards} {gpu} needed: {_listed(each)}; together {gib(sum(each.values()))}, "
            f"and a card has {size:g} GiB"
        )


@rule(
    "MTP606",
    "more cards needed than there are",
    Severity.ERROR,
    effect="Engines wait for a card that never comes free.",
    cure="Keep fewer variants or replicas, or add cards.",
    thread="docs/running.md",
    versions=ANY,
    status=BY_DESIGN,
    whole_stack=True,
)
def too_few_cards(stack: tuple[Facts, ...], machine: Machine) -> Iterator[str]:
    """Where the number of cards is given (--cards)."""
    engines = [facts for facts in stack if facts.cards]
    cards = sum(engine.cards * engine.replicas for engine in engines)
    if machine.cards is None or cards <= machine.cards:
        return
    each = _least(engines)
    text = "" if each is None else f": {_listed(each)}, together {gib(sum(each.values()))}"
    yield f"{cards} cards needed, {machine.cards} there{text}"


@rule(
    "MTP607",
    "the engines do not fit the machine's memory",
    Severity.ERROR,
    effect="The kernel ends a process while the engines load.",
    cure="Keep fewer variants or replicas, or lower VLLM_CPU_KVCACHE_SPACE.",
    thread="docs/running.md",
    versions=ANY,
    status=BY_DESIGN,
    whole_stack=True,
)
def machine_too_small(stack: tuple[Facts, ...], machine: Machine) -> Iterator[str]:
    """Weights and KV cache of all engines on the CPU; their programs' own memory comes on top."""
    each = {}
    for facts in stack:
        plan = memory_plan(facts) if facts.on_cpu else None
        if plan is not None:
            need = plan.weights.total + _kv_space(facts)
            each[facts.subject] = need * facts.replicas
    if machine.memory is not None and sum(each.values()) > machine.memory:
        yield f"{_listed(each)}; together {gib(sum(each.values()))} of {gib(machine.memory)}"


def _kv_space(facts: Facts) -> float:
    """Bytes of KV cache on a CPU; the setting is in GiB."""
    given = facts.env.get("VLLM_CPU_KVCACHE_SPACE", "")
    return int(given) * GIB if given.isascii() and given.isdigit() else 0


def _least(engines: list[Facts]) -> dict[str, float] | None:
    """Bytes each engine needs with one request of full length; None where one is not known."""
    each: dict[str, float] = {}
    for facts in engines:
        plan = memory_plan(facts)
        if plan is None:
            return None
        one = plan.cache.blocks(plan.context) * plan.cache.block_bytes
        each[facts.subject] = plan.fixed + one
    return each


def _listed(each: Mapping[str, float]) -> str:
    return ", ".join(f"{subject} {gib(need)}" for subject, need in each.items())


def _by_gpu(stack: tuple[Facts, ...]) -> dict[str, list[Facts]]:
    found: defaultdict[str, list[Facts]] = defaultdict(list)
    for facts in stack:
        if facts.gpu is not None and not facts.on_cpu:
            found[facts.gpu.id].append(facts)
    return found
