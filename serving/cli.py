"""The `moe-serving` command. Each command calls one function of a room.

Ray and vLLM are imported inside the commands that need them, so that the others
work on a laptop without either.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from serving.catalog.errors import CatalogError

if TYPE_CHECKING:
    from serving.stack.spec import StackSpec

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__.splitlines()[0])
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


@app.command()
def up(
    stack: Annotated[str, typer.Argument(help="a stack file, or the name of a shipped one")],
    port: Annotated[int | None, typer.Option(help="instead of gateway.port")] = None,
    detach: Annotated[bool, typer.Option(help="return when the stack is ready")] = False,
) -> None:
    """Start a stack and serve until Ctrl-C."""
    from serving.stack.load import load_stack

    try:
        spec = load_stack(stack)
    except CatalogError as error:
        _fail(str(error))
    if port is not None:
        spec = spec.model_copy(update={"gateway": spec.gateway.model_copy(update={"port": port})})
    from serving.stack import runtime

    if runtime.own_processes():
        _fail("a stack of yours runs already, or left processes behind: moe-serving down ends it")
    if not runtime.port_is_free(spec.gateway.host, spec.gateway.port):
        _fail(f"port {spec.gateway.port} is taken: end its owner, or choose another with --port")
    if detach:
        _bring_up(spec)
        return
    stopped = threading.Event()
    # Ctrl-C must reach this process only after everything it started is known to Ray.
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    try:
        _bring_up(spec)
        console.print("Ctrl-C ends the stack")
        while not stopped.wait(1):
            pass
    except KeyboardInterrupt:
        pass
    finally:
        console.print(f"ended {_shut_down()} processes")


def _connect(address: str) -> None:
    import logging

    import ray

    ray.init(address=address, namespace="serve", logging_level=logging.ERROR, log_to_driver=False)


def _bring_up(spec: StackSpec) -> None:
    from serving.stack import runtime

    try:
        address = runtime.start_ray(spec.name)
    except runtime.RuntimeFailure as error:
        _shut_down()
        _fail(str(error))
    _connect(address)
    # Only now: Ray Serve reads the environment that start_ray sets when it is imported.
    from serving.stack.deploy import DeployError, deploy

    try:
        deploy(spec, console.print)
    except DeployError as error:
        _shut_down()
        _fail(str(error))
    base = f"http://{spec.gateway.host}:{spec.gateway.port}"
    body = json.dumps(
        {
            "model": spec.models[0].id,
            "prompt": "def add(a, b):",
            "max_tokens": 48,
            "temperature": 0,
            "stream": True,
        }
    )
    console.print(f"ready at {base}/v1. Try:\n")
    print(f"curl -N {base}/v1/completions -H 'Content-Type: application/json' -d '{body}'\n")


@app.command()
def down() -> None:
    """End the running stack, and whatever an earlier one of yours left behind."""
    console.print(f"ended {_shut_down()} processes")


def _shut_down() -> int:
    from serving.stack import runtime

    return runtime.stop()


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Say what runs: each variant and its state."""
    from serving.stack import runtime

    state = runtime.running()
    if state is None or not runtime.own_processes():
        _fail("no stack runs")
    from ray import serve

    _connect(state["address"])

    applications = {
        name: str(application.status.value)
        for name, application in serve.status().applications.items()
    }
    if as_json:
        print(json.dumps({"stack": state["stack"], "applications": applications}))
        return
    for name, value in sorted(applications.items()):
        console.print(f"{name}: {value.lower()}")


def _fail(message: str) -> NoReturn:
    errors.print(f"[red]error:[/red] {message}", soft_wrap=True)
    sys.exit(2)


def main() -> None:
    """Entry point of the console script."""
    app()
