"""`moe-serving route explain`: which variant would answer a request, and why.

Owns the options and where the answer is printed. Leaves choosing to `router` and the
table to `gateway_plan`; nothing is started and no gateway is asked.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import HORIZONTALS
from rich.table import Table

from serving.console import console, fail

if TYPE_CHECKING:
    from serving.router.choose import Decision
    from serving.router.rules import Load
    from serving.router.table import ModelRoute
    from serving.stack.engine_plan import EnginePlan

route_app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Say which variant a request would get."
)
DOWN = "down"


@route_app.callback()
def _route() -> None:
    """Keeps `explain` a word of its own while there is no other command."""


@route_app.command()
def explain(
    request: Annotated[Path, typer.Argument(help="a request's body, as JSON")],
    stack: Annotated[str, typer.Option(help="a stack file, or the name of a shipped one")],
    load: Annotated[
        list[str] | None,
        typer.Option(help=f"VARIANT=running requests, or VARIANT={DOWN}; 0 where not given"),
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="of the request, as 'name: value'")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
) -> None:
    """Say which variant would answer, by which rule, and what each rule left."""
    from serving.catalog.errors import CatalogError
    from serving.router.choose import Router
    from serving.router.request import read_request
    from serving.router.table import UnknownModelError
    from serving.stack.engine_plan import plan_engines
    from serving.stack.gateway_plan import routing_table
    from serving.stack.load import load_stack

    try:
        spec = load_stack(stack)
        engines = plan_engines(spec)
        read = read_request(_body(request), _headers(header or ()))
        model = routing_table(spec, engines).model(read.model)
        loads = _loads(load or (), [each for each in engines if each.model_id == model.id])
        decision = Router(random.random).choose(model, read, loads, now=0.0)
    except (CatalogError, UnknownModelError) as error:
        fail(str(error))
    if as_json:
        print(json.dumps(_as_json(model, decision), indent=2))
    else:
        _print(model, decision)


def _body(file: Path) -> dict[str, Any]:
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        fail(f"{file}: cannot be read ({(error.strerror or str(error)).lower()}); check the path")
    except (ValueError, RecursionError) as error:
        fail(f"{file}: not JSON ({error}); write the body that a client would send")
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        fail(f"{file}: names no model; write an object with `model`, as a client would send it")
    return body


def _headers(given: Sequence[str]) -> dict[bytes, bytes]:
    headers = {}
    for text in given:
        name, separator, value = text.partition(":")
        if not separator:
            fail(f"--header: found {text!r}; write 'name: value'")
        headers[name.strip().lower().encode()] = value.strip().encode()
    return headers


def _loads(given: Sequence[str], engines: Sequence[EnginePlan]) -> Mapping[str, Load]:
    """Load by variant: all replicas of the file ready, and as many requests as was told."""
    from serving.router.rules import Load
    from serving.stack.update import fewest_replicas

    loads = {engine.variant: Load(0, max(1, fewest_replicas(engine))) for engine in engines}
    for text in given:
        name, _, told = text.partition("=")
        if name not in loads:
            fail(f"--load: found {text!r}; the variants are {', '.join(loads)}")
        if told == DOWN:
            loads[name] = Load(0, 0)
        elif told.isdecimal():
            loads[name] = loads[name]._replace(running=int(told))
        else:
            fail(f"--load: found {text!r}; write {name}=RUNNING or {name}={DOWN}")
    return loads


def _print(model: ModelRoute, decision: Decision) -> None:
    from serving.router.rules import WORDS

    table = Table("rule", "leaves", "why", box=HORIZONTALS, pad_edge=False)
    for step in decision.steps:
        table.add_row(step.rule, ", ".join(step.kept), step.why)
    chosen = f"{model.id}@{decision.variant}, {decision.rule}: {WORDS[decision.rule]}"
    console.print(chosen, soft_wrap=True, markup=False)
    if decision.shadow is not None:
        console.print(f"repeated to {decision.shadow}, whose answer is dropped", markup=False)
    if decision.steps:
        console.print(table)


def _as_json(model: ModelRoute, decision: Decision) -> dict[str, Any]:
    return {
        "model": model.id,
        **decision._asdict(),
        "steps": [step._asdict() for step in decision.steps],
    }
