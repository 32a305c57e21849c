"""`moe-serving plan`, `plan validate` and `plan calibrate`.

Owns options and where answers are printed. Each command calls the modules beside it;
errors are one line with the field, what was found and the cure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from serving.catalog import find_gpu, find_model, list_gpus
from serving.catalog.errors import CatalogError
from serving.catalog.gpus import GpuClass
from serving.catalog.models import ModelEntry
from serving.console import console, fail
from serving.planner import acceptance as acceptances
from serving.planner.acceptance import PRIOR_DRAFT_TOKENS, WORKLOADS, Acceptance
from serving.planner.anchors import shipped_anchors, validate_file
from serving.planner.calibrate import (
    Calibration,
    calibrate,
    card_of,
    measure_bandwidth,
    points_of_card,
    points_of_study,
    read_calibration,
    write_calibration,
)
from serving.planner.constants import VLLM_CPU
from serving.planner.detect import detect
from serving.planner.errors import PlannerError
from serving.planner.machine import machine_of
from serving.planner.memory import GIB
from serving.planner.plan import CPU, Request, choose_checkpoint, make_plan
from serving.planner.plot import write_plot
from serving.planner.precision import precision_of
from serving.planner.recommend import Recommendation, recommend
from serving.planner.report import gpu_table, plan_json, plan_tables
from serving.planner.speed import Setup, Target
from serving.planner.stack_file import write_stack
from serving.planner.validation_report import validation_json, validation_tables

plan_app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    help="Predict what fits a GPU, how fast it decodes and what drafting gains.",
)
EXAMPLE = "moe-serving plan --model qwen3.6-27b --gpu rtx3090"
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, for programs")]


@plan_app.callback()
def plan(
    context_: typer.Context,
    model: Annotated[str | None, typer.Option(help="id in the catalogue")] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU class in the catalogue; cpu")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="cards there are; 1")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="cards per engine; all of them")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="form of the weights, as the catalogue has it or its kind")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="longest prompt and answer, tokens")] = 32_768,
    concurrency: Annotated[int, typer.Option(min=1, help="requests at once")] = 4,
    prompt: Annotated[int, typer.Option(min=1, help="a usual prompt, tokens")] = 2_048,
    answer: Annotated[int, typer.Option(min=1, help="a usual answer, tokens")] = 512,
    workload: Annotated[str, typer.Option(help=f"one of {', '.join(WORKLOADS)}")] = "mixed",
    acceptance: Annotated[
        float | None,
        typer.Option(help=f"accepted / drafted tokens, measured with {PRIOR_DRAFT_TOKENS} drafts"),
    ] = None,
    per_position: Annotated[
        str | None, typer.Option(help="shares of steps accepting at least 1, 2, ... drafts: .8,.6")
    ] = None,
    acceptance_from: Annotated[
        Path | None, typer.Option(help="folder of a study that measured the acceptance")
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help="type of the KV cache")] = "bfloat16",
    ssm_dtype: Annotated[str | None, typer.Option(help="type of the GDN states")] = None,
    prefix_caching: Annotated[bool, typer.Option(help="reuse shared prompts")] = False,
    vision: Annotated[bool, typer.Option(help="load the vision tower")] = False,
    utilization: Annotated[
        float | None, typer.Option(help="share of a card's memory for the engine")
    ] = None,
    memory: Annotated[float | None, typer.Option(help="memory of one card, GiB")] = None,
    detect_gpus: Annotated[
        bool, typer.Option("--detect", help="take the GPUs of this machine, by NVML")
    ] = False,
    all_gpus: Annotated[
        bool, typer.Option("--all-gpus", help="a line for each catalogued class")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="the formula behind each figure")
    ] = False,
    as_json: AsJson = False,
    stack: Annotated[
        Path | None, typer.Option("--output", "-o", help="stack file to write")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="picture to write, .svg or .png")] = None,
) -> None:
    """Predict what fits, how fast it decodes and what drafting gains; no GPU is needed."""
    if context_.invoked_subcommand is not None:
        return
    with _told_errors():
        entry = find_model(_given(model, "model"))
        detected = detect() if detect_gpus else None
        given = {
            "acceptance": _acceptance(entry, workload, acceptance, per_position, acceptance_from),
            "context": min(context, entry.max_context),
            "concurrency": concurrency,
            "prompt": prompt,
            "answer": answer,
            "kv_dtype": kv_dtype,
            "ssm_dtype": ssm_dtype,
            "prefix_caching": prefix_caching,
            "vision": vision,
            "utilization": utilization,
            "memory_gib": memory or (detected.memory_gib if detected else None),
        }
        count = gpus or (detected.count if detected else 1)
        if all_gpus:
            _print_all_gpus(entry, checkpoint, count, tp, given, as_json)
            return
        chosen = detected.gpu if detected else find_gpu(_given(gpu, "gpu"))
        request = _request(entry, chosen, checkpoint, count, tp, given)
        asked, found = make_plan(request), recommend(request)
        if stack is not None:
            write_stack(found, stack)
        if plot is not None:
            write_plot(asked, plot)
        if as_json:
            print(json.dumps(plan_json(asked, found)))
        else:
            console.print(plan_tables(asked, found, explain=explain))
            if stack is not None:
                console.print(f"moe-serving up {stack}", soft_wrap=True, markup=False)


@plan_app.command()
def validate(
    anchors: Annotated[
        Path | None, typer.Argument(help="published measurements; the shipped ones")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare predictions with published measurements."""
    with _told_errors():
        found = validate_file(anchors or shipped_anchors())
        if as_json:
            print(json.dumps(validation_json(found)))
        else:
            console.print(validation_tables(found))


@plan_app.command("calibrate")
def calibrate_cpu(
    model: Annotated[str, typer.Option(help="the demo model that was measured")] = "tiny-moe",
    study: Annotated[
        Path | None, typer.Option(help="folder of a study of it on this machine, as n-sweep")
    ] = None,
    card: Annotated[
        Path | None, typer.Option(help="its model card, for speed-ups; the shipped one")
    ] = None,
) -> None:
    """Measure this machine's memory bandwidth and take an engine's fixed costs from a study."""
    with _told_errors():
        from serving.stack.runtime import home

        entry = find_model(model)
        if study is not None:
            points, plain_step = points_of_study(study)
            source = f"study {study}"
        else:
            points, plain_step = points_of_card(card or card_of(model)), VLLM_CPU.step_s
            source = "model card, the plain step assumed"
        target = Target.of(entry, precision_of(entry, next(iter(entry.checkpoints))))
        machine = machine_of(find_gpu(CPU), bandwidth=measure_bandwidth())
        found = calibrate(entry, Setup(target, machine, VLLM_CPU), points, plain_step, source)
        file = write_calibration(home(), found)
        console.print(
            f"memory bandwidth {found.bandwidth / 1e9:.1f} GB/s; step {found.step_s * 1e3:.2f} ms, "
            f"with drafts {found.speculation_s * 1e3:.2f} ms more and {found.draft_s * 1e3:.2f} ms "
            f"for each ({found.overhead_source})\n{file}",
            soft_wrap=True,
            markup=False,
        )


def _request(
    entry: ModelEntry,
    gpu: GpuClass,
    checkpoint: str | None,
    cards: int,
    tp: int | None,
    given: dict[str, Any],
) -> Request:
    """The request for one GPU class; raises CatalogError."""
    per_engine = tp or cards
    if cards % per_engine:
        raise PlannerError(f"tp: found {tp} of {cards} cards; choose a divisor of --gpus")
    gib = given["memory_gib"] or gpu.memory_gib
    memory = None if gib is None else int(gib * GIB)
    request = Request(
        model=entry,
        gpu=gpu,
        checkpoint=_checkpoint(entry, checkpoint, gpu, per_engine, memory),
        cards=per_engine,
        engines=cards // per_engine,
        bandwidth=_calibrated().bandwidth if gpu.id == CPU else None,
        **given,
    )
    return replace(request, family=_calibrated().family) if gpu.id == CPU else request


def _checkpoint(
    entry: ModelEntry, wanted: str | None, gpu: GpuClass, cards: int, memory: int | None
) -> str:
    """The checkpoint of that name, else the best of that kind (`int4` for `int4-awq`)."""
    if wanted is None:
        return choose_checkpoint(entry, gpu, cards, memory)
    if wanted in entry.checkpoints:
        return wanted
    kind = {key: each for key, each in entry.checkpoints.items() if each.quantisation == wanted}
    if not kind:
        entry.checkpoint(wanted)
    return choose_checkpoint(entry.model_copy(update={"checkpoints": kind}), gpu, cards, memory)


def _calibrated() -> Calibration:
    """What `plan calibrate` remembered of this machine; raises PlannerError."""
    from serving.stack.runtime import home

    found = read_calibration(home())
    if found is None:
        raise PlannerError(
            "gpu: the bandwidth of a CPU is the machine's; run `moe-serving plan calibrate` here "
            "first, which measures and remembers it"
        )
    return found


def _acceptance(
    entry: ModelEntry,
    workload: str,
    rate: float | None,
    per_position: str | None,
    study: Path | None,
) -> Acceptance:
    """The one that was given, else the prior of the workload; raises PlannerError."""
    if sum(each is not None for each in (rate, per_position, study)) > 1:
        raise PlannerError("give one of --acceptance, --per-position and --acceptance-from")
    if study is not None:
        return acceptances.from_study(study)
    if rate is not None:
        return acceptances.from_rate(rate, PRIOR_DRAFT_TOKENS)
    if per_position is not None:
        try:
            shares = [float(part) for part in per_position.split(",")]
        except ValueError:
            raise PlannerError(
                f"per-position: found {per_position!r}; write shares with commas, as .8,.6,.5"
            ) from None
        return acceptances.from_positions(shares)
    return acceptances.prior(workload, experts=entry.architecture.experts is not None)


def _print_all_gpus(
    entry: ModelEntry,
    checkpoint: str | None,
    cards: int,
    tp: int | None,
    given: dict[str, Any],
    as_json: bool,
) -> None:
    found: list[tuple[str, Recommendation | str]] = []
    for each in list_gpus():
        try:
            request = _request(entry, each, checkpoint, cards, tp, given)
            found.append((each.id, recommend(request)))
        except CatalogError as error:
            found.append((each.id, str(error)))
    if as_json:
        plans = {
            name: {"error": each} if isinstance(each, str) else plan_json(each.plan, each)
            for name, each in found
        }
        print(json.dumps(plans))
    else:
        console.print(gpu_table(found))


def _given(value: str | None, option: str) -> str:
    if value is None:
        raise PlannerError(f"--{option} is missing; as in `{EXAMPLE}`")
    return value


@contextmanager
def _told_errors() -> Iterator[None]:
    """Ends the command with one line for what a user can cure."""
    try:
        yield
    except CatalogError as error:
        fail(str(error))
