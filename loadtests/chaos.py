"""Mixed load on a stack of its own while parts of it are killed and halted.

    python loadtests/chaos.py --minutes 10 --seed 0

Owns the program's options, and starting and ending the stack. Leaves the run to
`serving.studies.chaos`. Status 0 where every goal is reached, 1 where one is not, 2 where the
run could not be made.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import sys
import tempfile
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from arguments import whole_number
from rich.console import Console

from serving.catalog.errors import ConfigError
from serving.console import console, fail
from serving.engines.probe_settings import VARIABLE as PROBES
from serving.processes import marked
from serving.signals import handled
from serving.stack.engine_plan import plan_engines
from serving.stack.environment import MARK, free_port, ray_token
from serving.stack.load import load_stack, stack_path
from serving.stack.runtime import HOME_VARIABLE
from serving.studies.chaos.faults import UnrecoveredError
from serving.studies.chaos.processes import NoStackError
from serving.studies.chaos.report import as_json, reached, rendered
from serving.studies.chaos.run import Outcome, Plan, run_chaos
from serving.studies.overhead.servers import STACK, Server, ServerError

START_WITHIN_S = 900.0
# At least: the first fault needs load before it and a recovery after it.
LEAST_MINUTES = 0.5


def minutes(text: str) -> float:
    """A number of minutes; raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not LEAST_MINUTES <= value < float("inf"):
        raise ArgumentTypeError(f"found {text!r}; write a number from {LEAST_MINUTES} on")
    return value


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=minutes, default=10.0, help="of load and faults")
    add("--faults", type=whole_number(1), help="at most so many; the run ends when they are done")
    add("--seed", type=int, default=0, help="decides the load and the faults")
    add("--clients", type=whole_number(1), default=8, help="requests in flight")
    add("--stack", default="chaos-demo", help="stack file, or the name of a shipped one")
    add("--out", type=Path, default=Path("runs/chaos"), help="folder of the result")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the run, print what it says, and write `chaos.json`."""
    given = options(arguments)
    try:
        outcome, left = carry_out(given)
    except (ConfigError, ServerError, NoStackError, UnrecoveredError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    # A table would be folded where the output is a file.
    wide = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    wide.print(rendered(outcome))
    console.print(f"processes left after the end: {left}")
    file = given.out / "chaos.json"
    file.write_text(json.dumps(as_json(outcome) | {"processes_left": left}, indent=1) + "\n")
    console.print(str(file), soft_wrap=True, markup=False)
    sys.exit(0 if reached(outcome) and not left else 1)


def carry_out(given: argparse.Namespace) -> tuple[Outcome, int]:
    """The run on a stack of its own, and how many of its processes were left after it."""
    plans = plan_engines(load_stack(given.stack))
    models = list(dict.fromkeys(plan.model_id for plan in plans))
    plan = Plan(
        seed=given.seed,
        seconds=60 * given.minutes,
        faults=given.faults,
        clients=given.clients,
        engines_begin_at_zero=not any(PROBES in each.env for each in plans),
    )
    given.out.mkdir(parents=True, exist_ok=True)

    def told(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    with handled((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler):
        with started(given.stack, models, given.out / "stack.log", told) as (url, home):
            outcome = run_chaos(url, home, models, plan, told)
        return outcome, len(marked(MARK, str(home)))


@contextlib.contextmanager
def started(
    stack: str, models: Sequence[str], log: Path, told: Callable[[str], None]
) -> Iterator[tuple[str, Path]]:
    """The stack for the length of the block: its address without /v1, and its state folder.

    Raises ServerError where it does not come up; every process is ended whatever happens.
    """
    # Below /tmp: a socket's path has at most 107 bytes, and Ray's are long.
    folder = Path(tempfile.mkdtemp(prefix="ms-", dir="/tmp")).resolve()
    home, port = folder / "home", free_port()
    program = str(Path(sys.executable).parent / "moe-serving")
    env = {HOME_VARIABLE: str(home), **ray_token(folder / "ray-token")}
    up = [program, "up", str(stack_path(stack).resolve()), "--port", str(port), "--detach"]
    server = Server(STACK, port, up, env, folder / "stack", stop_command=[program, "down"])
    try:
        told(f"starting {stack}")
        server.start()
        for model in models:
            server.wait_until_ready(model, START_WITHIN_S)
        # A replica of each model answers; `up` returns when all do.
        if server.leader is not None and server.leader.wait(START_WITHIN_S):
            raise ServerError(server.failure("did not start"))
        yield f"http://127.0.0.1:{port}", home
    finally:
        # An impatient second Ctrl-C would leave engines behind.
        with handled((signal.SIGINT, signal.SIGTERM), signal.SIG_IGN):
            told("ending the stack")
            server.stop()
            with contextlib.suppress(OSError):
                shutil.copy(home / "up.log", log)
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
