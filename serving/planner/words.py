"""The recommendation in plain words, and the formula behind each figure.

Owns sentences and formulas. Leaves tables to `report`, the figures to `plan`.
"""

from __future__ import annotations

from collections.abc import Iterator

from serving.planner.memory import GIB
from serving.planner.plan import MOST_CONCURRENCY, Plan
from serving.planner.recommend import TELLING_GAIN, Recommendation
from serving.planner.speed import Decode
from serving.planner.tables import MIB

LABEL = "predicted, not measured"
# Fewer output tokens than this are hardly an answer.
SHORTEST_TOLD = 10


def advice(found: Recommendation) -> Iterator[str]:
    """What to do and what to expect of it, a sentence each."""
    plan, n = found.plan, found.draft_tokens
    if found.fits is False:
        yield _shortage(found)
        return
    if found.changes:
        yield f"Changed so that it fits: {', and '.join(found.changes)}."
    speed = plan.speeds[n]
    if n:
        yield (
            f"Draft {n} token{'s' if n > 1 else ''}: {speed.per_request:.0f} tokens/s "
            f"{_each(speed)} where plain decoding gives {plan.plain.per_request:.0f}, "
            f"{speed.speedup:.2f} times as much ({LABEL})."
        )
        yield from _limits(plan)
    else:
        yield (
            f"{_why_plain(plan)} Plain decoding gives {speed.per_request:.0f} tokens/s "
            f"{_each(speed)} ({LABEL})."
        )
    if found.both_variants:
        yield (
            "There are cards for two engines: one drafts, the other serves plainly what the "
            "router sends it under load, and long shared prompts."
        )
    yield "Measure it before you rely on it: moe-serving study run quick --out runs/quick"


def _each(speed: Decode) -> str:
    one = speed.concurrency == 1
    return "for one request" if one else f"for each of {speed.concurrency} requests"


def _why_plain(plan: Plan) -> str:
    """Why nothing is drafted."""
    if not plan.request.can_draft:
        return "Nothing is known that could draft here."
    if plan.best.speedup < TELLING_GAIN:
        return (
            f"Do not draft: the best n gains {plan.best.speedup - 1:.0%}, less than the "
            f"{TELLING_GAIN - 1:.0%} this model can tell."
        )
    most = max(memory.largest_concurrency or 0 for memory in plan.memory[1:])
    return (
        f"Drafting for so many requests does not fit; for {most} at once it would, and speed each "
        "of them up."
    )


def _limits(plan: Plan) -> Iterator[str]:
    if plan.crossover is None:
        yield f"Plain decoding does not overtake it up to {MOST_CONCURRENCY} requests at once."
    else:
        yield f"From about {plan.crossover} requests at once plain decoding is as fast."
    if plan.break_even_output is not None and plan.break_even_output >= SHORTEST_TOLD:
        yield (
            f"Prefill takes longer while drafting: answers of less than "
            f"{plan.break_even_output:.0f} tokens lose more than they gain."
        )


def _shortage(found: Recommendation) -> str:
    memory = found.plan.memory[found.draft_tokens]
    budget = 0 if memory.budget is None else memory.budget
    what = "loading" if memory.loads is False else "serving"
    needed = memory.load_peak if memory.loads is False else memory.required
    return (
        f"It does not fit: {what} needs {needed / GIB:.1f} GiB on each card of "
        f"{budget / GIB:.1f} GiB to use. Choose a smaller checkpoint, more cards (--gpus) or a "
        "larger class."
    )


def formulas(found: Recommendation) -> Iterator[tuple[str, str, str]]:
    """(figure, formula with its source, value) of the recommended n."""
    plan, n = found.plan, found.draft_tokens
    yield from _memory_formulas(plan, n)
    speed = plan.speeds[n]
    yield (
        "tokens per step",
        "E(n) = 1 + p1 + ... + pn (Leviathan et al. 2023)",
        f"{speed.tokens_per_step:.2f} ({plan.request.acceptance.source})",
    )
    yield from _step_formulas(plan, n)
    yield (
        "speed-up",
        "E(n) x T(0) / T(n)",
        f"{speed.tokens_per_step:.2f} x {speed.plain_step_s * 1e3:.1f} / "
        f"{speed.step.total * 1e3:.1f} ms = {speed.speedup:.2f} ({LABEL})",
    )
    if plan.first_token_s is not None:
        constants = plan.request.setup.constants
        yield (
            "time to first token",
            f"2 x active parameters x prompt / ({constants.prefill_fraction:g} x peak) + step, "
            f"x {1 + constants.prefill_tax:g} while drafting",
            f"{plan.first_token_s * 1e3:.0f} ms, drafting "
            f"{(plan.first_token_drafting_s or 0) * 1e3:.0f} ms ({LABEL})",
        )


def _memory_formulas(plan: Plan, n: int) -> Iterator[tuple[str, str, str]]:
    request, memory = plan.request, plan.memory[n]
    cache, layers = memory.cache, request.model.architecture.layers.gdn
    page = request.model.architecture.gdn_page_bytes(
        n, ssm_dtype=request.ssm_dtype, tensor_parallel=request.cards
    )
    yield (
        "weights",
        f"sum over parts of parameters x bits / 8 / {request.cards} cards "
        f"({request.setup.target.precision.name})",
        f"{memory.weights.total / GIB:.2f} GiB",
    )
    yield (
        "copies at load",
        "2 x vocabulary x hidden size x 2 B while drafting (vLLM issue 53887)",
        f"{memory.load_transient / GIB:.2f} GiB for a moment",
    )
    yield (
        "GDN page",
        "(2 hk Hk + hv Hv) / TP x (kernel - 1 + n) x 2 B + Hv / TP x hv hk x S "
        "(vLLM 0.32, mamba_utils.py)",
        f"{page:,} B",
    )
    yield (
        "GDN states of a request",
        "page x GDN layers x (1 + n), 2 + n with prefix caching",
        f"{memory.gdn_states} x {layers} pages = {memory.gdn_state_bytes / MIB:.0f} MiB",
    )
    yield (
        "hybrid block",
        "16 x ceil(page / (16 x 2 x kv heads x head dim x bytes)) (vLLM 0.32, interface.py)",
        f"{cache.block_tokens} tokens, {cache.block_bytes / MIB:.1f} MiB",
    )
    yield (
        "cache of a request",
        "attention groups x ceil(context / block) + GDN groups x states, in blocks",
        f"{cache.blocks(request.context)} blocks, {memory.blocks} in all",
    )


def _step_formulas(plan: Plan, n: int) -> Iterator[tuple[str, str, str]]:
    constants, step = plan.request.setup.constants, plan.speeds[n].step
    share = constants.bandwidth_fraction
    rows = (
        (
            "weights of a step",
            f"per part max(bytes / ({share:g} BW), 2 parameters x tokens / "
            f"({constants.tensor_fraction:g} peak)); experts N(t) = E (1 - (1 - k/E)^t), "
            f"t = 1 + {constants.routing_correlation:g} n per request (MoESD; Cohere)",
            step.weights,
        ),
        ("GDN state", f"requests x (1 read + n + 1 writes) x state / ({share:g} BW)", step.state),
        ("KV cache", f"requests x depth x bytes per token / ({share:g} BW)", step.kv),
        ("logits", f"tokens x vocabulary x 10 B / ({share:g} BW)", step.logits),
        ("fixed cost", f"of a step of {plan.request.family.name}", step.fixed),
        ("expert layers", "layers x fixed cost of routing and small kernels", step.expert_layers),
        ("all-reduce", "2 x layers x latency, with more than one card", step.allreduce),
        (
            "drafting",
            f"n x ((MTP layer + lm_head bytes) / ({share:g} BW) + fixed cost of a draft)",
            step.drafting,
        ),
    )
    for name, formula, seconds in rows:
        yield name, formula, f"{seconds * 1e3:.2f} ms"
    yield "step T(n)", "the sum of the above", f"{step.total * 1e3:.2f} ms ({LABEL})"
