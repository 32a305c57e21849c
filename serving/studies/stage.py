"""The engines a study measures: which stack serves its arms, and bringing it up.

Owns the stack file that is derived from the study's own, what fits on the machine at one
time, and the end of whatever it started. Leaves starting itself to `moe-serving up`, run as a
program with a state folder of its own, and the load to `run`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from serving.catalog.errors import ConfigError, Problem
from serving.signals import handled
from serving.stack import history, runtime
from serving.stack.engine_plan import EnginePlan, plan_engines
from serving.stack.environment import free_port, ray_token
from serving.stack.load import load_stack
from serving.stack.spec import StackSpec
from serving.studies.environment import gpu_count
from serving.studies.overhead.servers import STACK, Server
from serving.studies.records import Arm
from serving.studies.spec import Blocks, StudySpec, variant_name

# docs/benchmarks.md: four CPU engines with their servers took about 15 GiB.
CPU_ENGINE_GIB = 4.0
# `up` gives up by itself when an engine fails; weights may have to be fetched before.
START_WITHIN_S = 7200.0
STACK_LOG = "stack.log"


class StageError(RuntimeError):
    """What the study needs cannot be served here; the text says why and the cure."""


def study_stack(spec: StudySpec) -> StackSpec | None:
    """The stack that serves the study's arms, and nothing else; None for endpoints only.

    The study file's stack with the one model, the study's settings over its own, a variant
    for each arm, and the gateway's defaults. Generated variants differ in n alone: each is the
    stack's first drafting variant with another n. Raises ConfigError.
    """
    if spec.stack is None:
        return None
    data = json.loads(history.to_json(load_stack(spec.stack)))
    model = _model(spec, data["models"])
    model |= json.loads(spec.settings.model_dump_json(exclude_unset=True))
    kept = {name: model["variants"][name] for name in _known(spec, model)}
    model["variants"] = {**_generated(spec, model), **kept}
    model["default_variant"] = next(iter(model["variants"]))
    # Arms are asked for by name, and the stack's rules may name variants that are none.
    model.pop("routing", None)
    derived = {"schema": 1, "name": "study", "models": [model]}
    return StackSpec.model_validate_json(json.dumps(derived))


def arms_of(spec: StudySpec, stack: StackSpec | None, url: str) -> tuple[Arm, ...]:
    """Every arm of the study, in its order; those of the stack are served at `url`."""
    plans = plan_engines(stack) if stack else ()
    served = [
        Arm(
            name=plan.variant,
            url=url,
            model=f"{plan.model_id}@{plan.variant}",
            draft_tokens=_draft_tokens(plan),
        )
        for plan in plans
    ]
    others = [
        Arm(
            name=name,
            url=each.url,
            model=each.model,
            draft_tokens=each.draft_tokens,
            engine=each.engine,
        )
        for name, each in spec.arms.endpoints.items()
    ]
    return (*served, *others)


def fitting_blocks(spec: StudySpec, stack: StackSpec | None) -> Blocks:
    """What `blocks` is on this machine: as many engines at a time as it has GPUs or memory for.

    A GPU is set aside whole for an engine; on a CPU, each needs memory only.
    """
    if spec.blocks != "auto":
        return spec.blocks
    plans = plan_engines(stack) if stack else ()
    if _fits(plans):
        return "all-at-once"
    plain = [plan for plan in plans if plan.variant == spec.plain]
    others = [plan for plan in plans if plan.variant != spec.plain]
    if spec.plain is not None and all(_fits([*plain, other]) for other in others):
        return "pairs"
    return "one-by-one"


def running_stack(stack: StackSpec) -> tuple[str, StackSpec] | None:
    """The API and the stack that runs here, where it serves every arm just as `stack` does.

    None where none runs. Raises StageError where one runs that is not the same: the study's own
    beside it would be measured under its load.
    """
    run, have = runtime.running(), history.current()
    if run is None or have is None or not run["ready"] or not runtime.ray_answers(run):
        return None
    missing = _engines(stack) - _engines(have)
    if missing:
        raise StageError(
            f"the stack that runs ({have.name}) does not serve {', '.join(sorted(missing))} as the "
            "study needs it; end it with `moe-serving down`, and the study starts its own"
        )
    return f"{run['url']}/v1", have


@contextlib.contextmanager
def started(
    stack: StackSpec, variants: Collection[str], log: Path, report: Callable[[str], None]
) -> Iterator[str]:
    """Serve these variants of `stack` for the length of the block; yields the API's URL.

    What the stack printed is added to the file `log`. Raises ServerError where it does not
    come up; every process is ended whatever happens.
    """
    # Below /tmp: a socket's path has at most 107 bytes, and Ray's are long.
    folder = Path(tempfile.mkdtemp(prefix="ms-", dir="/tmp"))
    server = _server(_only(stack, variants), folder)
    try:
        report(f"starting {', '.join(variants)}")
        server.start()
        for variant in variants:
            server.wait_until_ready(f"{stack.models[0].id}@{variant}", START_WITHIN_S)
        yield server.url
    finally:
        # An impatient second Ctrl-C would leave engines behind.
        with handled((signal.SIGINT, signal.SIGTERM), signal.SIG_IGN):
            report("ending the stack")
            server.stop()
            _keep_log(folder, log)
            shutil.rmtree(folder, ignore_errors=True)


def _model(spec: StudySpec, models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    by_id = {model["id"]: model for model in models}
    if spec.model is None:
        return models[0]
    if spec.model not in by_id:
        _refuse(spec, "model", f"found {spec.model!r}; {spec.stack} has {', '.join(by_id)}")
    return by_id[spec.model]


def _known(spec: StudySpec, model: Mapping[str, Any]) -> tuple[str, ...]:
    for name in spec.arms.variants:
        if name not in model["variants"]:
            known = ", ".join(model["variants"])
            _refuse(spec, "arms.variants", f"found {name!r}; {spec.stack} has {known}")
    return spec.arms.variants


def _generated(spec: StudySpec, model: Mapping[str, Any]) -> dict[str, Any]:
    drafting_ones = (each for each in model["variants"].values() if each.get("speculative"))
    base: Mapping[str, Any] = next(drafting_ones, {})
    drafting = base.get("speculative") or {"method": "mtp"}
    # Where nothing is said, it is on for plain alone, and changes how GDN state is kept.
    caching = {} if "prefix_caching" in model else {"prefix_caching": False}
    made = {}
    for n in spec.arms.draft_tokens:
        block = caching | {name: value for name, value in base.items() if name != "speculative"}
        if n:
            block["speculative"] = {**drafting, "num_speculative_tokens": n}
        made[variant_name(n)] = block
    return made


def _refuse(spec: StudySpec, field: str, text: str) -> None:
    raise ConfigError((Problem(spec.name, 0, field, text),))


def _draft_tokens(plan: EnginePlan) -> int:
    return plan.speculative["num_speculative_tokens"] if plan.speculative else 0


def _fits(plans: Sequence[EnginePlan]) -> bool:
    on_gpu = sum(plan.gpus * (plan.replicas or 1) for plan in plans)
    on_cpu = sum(plan.replicas or 1 for plan in plans if not plan.gpus)
    available_gib = psutil.virtual_memory().available / 2**30
    return (not on_gpu or on_gpu <= gpu_count()) and on_cpu * CPU_ENGINE_GIB <= available_gib


def _engines(stack: StackSpec) -> set[str]:
    """The engines' names, which hold a hash of all that decides how each one runs."""
    return {plan.app_name for plan in plan_engines(stack)}


def _only(stack: StackSpec, variants: Collection[str]) -> StackSpec:
    data = json.loads(history.to_json(stack))
    model = data["models"][0]
    model["variants"] = {name: model["variants"][name] for name in variants}
    model["default_variant"] = next(iter(variants))
    return StackSpec.model_validate_json(json.dumps(data))


def _server(stack: StackSpec, folder: Path) -> Server:
    file = folder / "study.yaml"
    file.write_text(history.to_json(stack), encoding="utf-8")
    port = free_port()
    program = str(Path(sys.executable).parent / "moe-serving")
    env = {runtime.HOME_VARIABLE: str(folder / "home"), **ray_token(folder / "ray-token")}
    up = [program, "up", str(file), "--port", str(port), "--detach"]
    return Server(STACK, port, up, env, folder / "stack", stop_command=[program, "down"])


def _keep_log(folder: Path, log: Path) -> None:
    with contextlib.suppress(OSError):
        text = (folder / "home" / "up.log").read_text(encoding="utf-8", errors="replace")
        with log.open("a", encoding="utf-8") as file:
            file.write(text)
