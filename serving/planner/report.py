"""A plan as tables for people and as JSON for programs.

Owns what is shown and how. Leaves sentences and formulas to `words`, the figures to
`plan` and `recommend`, the validation's report to `validation_report`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from serving.planner.memory import GIB, MemoryPlan, shortest_prefix_hit
from serving.planner.plan import Load, Plan
from serving.planner.recommend import Recommendation, Setting
from serving.planner.speed import Decode
from serving.planner.tables import MIB, count, figures, size, yes
from serving.planner.words import LABEL, advice, formulas

PART_NAMES = {
    "embedding": "embedding",
    "attention": "attention",
    "gdn": "GDN layers",
    "ffn": "feed-forward",
    "shared": "routers, shared experts",
    "experts": "experts",
    "lm_head": "lm_head",
    "mtp": "MTP head",
    "mtp_experts": "MTP head's experts",
    "vision": "vision tower",
}


def plan_tables(asked: Plan, found: Recommendation, *, explain: bool = False) -> RenderableType:
    """The plan that was asked for, then what to do."""
    parts: list[RenderableType] = [
        Text(_heading(asked), style="bold"),
        _memory_table(asked, asked.memory[min(found.draft_tokens, len(asked.memory) - 1)]),
        _fit_table(asked),
        _speed_table(asked),
        _load_table(asked),
        Text(_first_token(asked)),
        Text("\nSo?", style="bold"),
        *(Text(f"- {sentence}") for sentence in advice(found)),
        *(Text(f"- Caution: {caution}.", style="yellow") for caution in found.cautions),
    ]
    if explain:
        parts.append(_formula_table(found))
    return Group(*parts)


def _heading(plan: Plan) -> str:
    request = plan.request
    size = "" if plan.size_error is None else f", sum {plan.size_error:+.1%} of the published size"
    return (
        f"{request.model.name}, {request.checkpoint} ({request.setup.target.precision.name}{size}) "
        f"on {request.cards} x {request.gpu.name}; {request.concurrency} requests of up to "
        f"{request.context} tokens. Acceptance: {request.acceptance.source}"
    )


def _memory_table(plan: Plan, drafting: MemoryPlan) -> Table:
    plain, n = plan.memory[0], plan.memory.index(drafting)
    columns = {"plain": plain} if n == 0 else {"plain": plain, f"n = {n}": drafting}
    unit, name_of_unit = (GIB, "GiB") if drafting.required >= GIB else (MIB, "MiB")
    table = figures(f"{name_of_unit} on each card", *columns, title="Fits?")
    for part, name in PART_NAMES.items():
        parts = [getattr(each.weights, part) for each in columns.values()]
        if any(parts):
            table.add_row(name, *(size(each, unit) for each in parts))
    for name, value in (
        ("GDN states, all requests", lambda m: m.gdn_state_bytes * m.concurrency),
        ("KV cache, all requests", lambda m: m.kv_bytes_per_token * m.context * m.concurrency),
        ("padding to blocks", _padding),
        ("CUDA graphs (estimate)", lambda m: m.cuda_graphs),
        ("activations (estimate)", lambda m: m.activations),
        ("runtime (estimate)", lambda m: m.runtime),
        ("needed", lambda m: m.required),
        ("for a moment at load", lambda m: m.load_peak),
        ("to use", lambda m: m.budget),
    ):
        table.add_row(name, *(size(value(each), unit) for each in columns.values()))
    return table


def _padding(memory: MemoryPlan) -> int:
    """What rounding to blocks and groups of layers costs, all requests."""
    kv = memory.kv_bytes_per_token * memory.context * memory.concurrency
    return memory.cache_bytes - kv - memory.gdn_state_bytes * memory.concurrency


def _fit_table(plan: Plan) -> Table:
    table = figures(
        "n",
        "fits",
        "needed",
        f"most of {plan.request.context}",
        f"longest of {plan.request.concurrency}",
        "GDN MiB",
        "block",
        "shortest hit",
        caption=f"Needed in GiB; most requests of {plan.request.context} tokens at once; longest "
        f"of {plan.request.concurrency} at once, tokens; GDN states of a request; hybrid block, "
        "tokens; shortest shared prefix that a cache finds, tokens",
    )
    longest = plan.request.model.max_context
    for n, memory in enumerate(plan.memory):
        context = memory.largest_context
        hit = shortest_prefix_hit(memory.cache.block_tokens, drafting=n > 0)
        table.add_row(
            str(n),
            yes(memory.fits),
            size(memory.required),
            count(memory.largest_concurrency),
            count(None if context is None else min(context, longest)),
            f"{memory.gdn_state_bytes / MIB:.0f}",
            str(memory.cache.block_tokens),
            str(hit),
        )
    return table


def _speed_table(plan: Plan) -> Table:
    table = figures(
        "n",
        "tokens/s each",
        "in all",
        "tokens/step",
        "step, ms",
        "speed-up",
        title=f"How fast? {plan.request.concurrency} requests, {plan.request.depth} tokens deep "
        f"({LABEL})",
    )
    for each in plan.speeds:
        table.add_row(
            str(each.draft_tokens),
            f"{each.per_request:.1f}",
            f"{each.tokens_per_s:.0f}",
            f"{each.tokens_per_step:.2f}",
            f"{each.step.total * 1e3:.1f}",
            f"{each.speedup:.2f}",
            style="bold" if each is plan.best else "",
        )
    return table


def _load_table(plan: Plan) -> Table:
    table = figures("at once", "plain tokens/s", "best n", "tokens/s", "speed-up", "fits")
    for load in plan.loads:
        table.add_row(
            str(load.concurrency),
            f"{load.plain.tokens_per_s:.0f}",
            str(load.best.draft_tokens),
            f"{load.best.tokens_per_s:.0f}",
            f"{load.best.speedup:.2f}",
            yes(_has_memory(plan, load)),
        )
    return table


def _has_memory(plan: Plan, load: Load) -> bool | None:
    most = plan.memory[load.best.draft_tokens].largest_concurrency
    return None if most is None else load.concurrency <= most


def _first_token(plan: Plan) -> str:
    first, drafting = plan.first_token_s, plan.first_token_drafting_s
    if first is None or drafting is None:
        return "Time to first token: the arithmetic of this class is not known."
    return (
        f"Time to first token of a {plan.request.prompt}-token prompt, idle: {first * 1e3:.0f} ms, "
        f"drafting {drafting * 1e3:.0f} ms ({LABEL})."
    )


def _formula_table(found: Recommendation) -> Table:
    table = Table(
        "figure", "formula", "value", title="How each figure is made", box=box.HORIZONTALS
    )
    for row in formulas(found):
        table.add_row(*row)
    return table


def gpu_table(found: list[tuple[str, Recommendation | str]]) -> RenderableType:
    """One line for each GPU class: what `recommend` says of it, or why there is no plan."""
    table = figures(
        "class",
        "checkpoint",
        "fits",
        "at once",
        "context",
        "n",
        "plain",
        "with n",
        "gain",
        title=f"All catalogued classes, tokens/s of one request ({LABEL})",
    )
    without = [Text(f"{name}: {each}") for name, each in found if isinstance(each, str)]
    for name, each in found:
        if isinstance(each, str):
            continue
        request, speed = each.plan.request, each.plan.speeds[each.draft_tokens]
        table.add_row(
            name,
            request.checkpoint,
            yes(each.fits),
            str(request.concurrency),
            str(request.context),
            str(each.draft_tokens),
            f"{each.plan.plain.per_request:.0f}",
            f"{speed.per_request:.0f}",
            f"{speed.speedup:.2f}",
        )
    return Group(table, *without)


def plan_json(asked: Plan, found: Recommendation) -> dict[str, Any]:
    """Everything of the tables, for programs. Bytes, seconds and tokens throughout."""
    request = asked.request
    return {
        "kind": "prediction",
        "model": request.model.id,
        "gpu": request.gpu.id,
        "cards": request.cards,
        "engines": request.engines,
        "checkpoint": request.checkpoint,
        "precision": request.setup.target.precision.name,
        "weights_size_error": asked.size_error,
        "context": request.context,
        "concurrency": request.concurrency,
        "prompt": request.prompt,
        "answer": request.answer,
        "acceptance": {
            "source": request.acceptance.source,
            "per_position": [request.acceptance.at(i) for i in range(1, len(asked.speeds))],
        },
        "memory": [_memory_json(n, each) for n, each in enumerate(asked.memory)],
        "speeds": [_speed_json(each) for each in asked.speeds],
        "loads": [
            {
                "concurrency": load.concurrency,
                "plain": _speed_json(load.plain),
                "best": _speed_json(load.best),
                "fits": _has_memory(asked, load),
            }
            for load in asked.loads
        ],
        "ttft_s": asked.first_token_s,
        "ttft_drafting_s": asked.first_token_drafting_s,
        "best_n": asked.best.draft_tokens,
        "best_speedup": asked.best.speedup,
        "crossover_concurrency": asked.crossover,
        "break_even_output_tokens": asked.break_even_output,
        "recommendation": _recommendation_json(found),
        "formulas": [
            {"figure": figure, "formula": formula, "value": value}
            for figure, formula, value in formulas(found)
        ],
    }


def _memory_json(n: int, memory: MemoryPlan) -> dict[str, Any]:
    cache = memory.cache
    return {
        "draft_tokens": n,
        "fits": memory.fits,
        "required": memory.required,
        "budget": memory.budget,
        "memory": memory.memory,
        "weights": memory.weights.by_part(),
        "load_transient": memory.load_transient,
        "load_peak": memory.load_peak,
        "gdn_states_per_request": memory.gdn_states,
        "gdn_state_bytes_per_request": memory.gdn_state_bytes,
        "kv_bytes_per_token": memory.kv_bytes_per_token,
        "block_tokens": cache.block_tokens,
        "block_bytes": cache.block_bytes,
        "blocks_per_request": cache.blocks(memory.context),
        "blocks": memory.blocks,
        "shortest_prefix_hit": shortest_prefix_hit(cache.block_tokens, drafting=n > 0),
        "cuda_graphs": memory.cuda_graphs,
        "activations": memory.activations,
        "runtime": memory.runtime,
        "largest_concurrency": memory.largest_concurrency,
        "largest_context": memory.largest_context,
    }


def _speed_json(speed: Decode) -> dict[str, Any]:
    return {
        "draft_tokens": speed.draft_tokens,
        "concurrency": speed.concurrency,
        "tokens_per_s": speed.tokens_per_s,
        "tokens_per_s_per_request": speed.per_request,
        "tokens_per_step": speed.tokens_per_step,
        "step_s": speed.step.total,
        "speedup": speed.speedup,
    }


def _recommendation_json(found: Recommendation) -> dict[str, Any]:
    request = found.plan.request
    return {
        "fits": found.fits,
        "draft_tokens": found.draft_tokens,
        "concurrency": request.concurrency,
        "context": request.context,
        "predicted": _speed_json(found.plan.speeds[found.draft_tokens]),
        "advice": list(advice(found)),
        "changes": list(found.changes),
        "cautions": list(found.cautions),
        "settings": dict(_pairs(found.settings)),
        "drafting_settings": dict(_pairs(found.drafting_settings)),
        "speculative": dict(_pairs(found.speculative)) if found.draft_tokens else None,
    }


def _pairs(settings: tuple[Setting, ...]) -> Iterator[tuple[str, Any]]:
    for each in settings:
        yield each.key, each.value
