"""Load-aware routing over a ramp of concurrency, beside each variant on its own.

    python loadtests/routing.py --out runs/routing

Owns the program's options. It starts the stack, ramps from 1 stream to 32 and back with each
arm in turns, ends the stack, and writes a report. Leaves all of that to
`serving.studies.routing`.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from arguments import whole_number
from rich.console import Console

from serving.catalog.errors import ConfigError
from serving.console import console, fail
from serving.signals import handled
from serving.studies.environment import commit, machine_facts
from serving.studies.overhead.servers import ServerError
from serving.studies.prompts import PromptsError, load_prompts
from serving.studies.routing.figures import NothingMeasuredError, figures_of, headline
from serving.studies.routing.report import Outcome, as_table, settings_in_words, write_report
from serving.studies.routing.run import Contest, contest, run_rounds, shape_of
from serving.studies.stage import STACK_LOG, started

STEPS = "1,2,4,8,16,24,32,24,16,8,4,2,1"
MAX_STREAMS = 256


def steps_of(text: str) -> tuple[int, ...]:
    """The numbers of streams in `1,2,4`; raises ArgumentTypeError."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 0 < int(part) <= MAX_STREAMS for part in parts):
        raise ArgumentTypeError(
            f"found {text!r}; write numbers of streams from 1 to {MAX_STREAMS}, as in 1,2,4,2,1"
        )
    return tuple(int(part) for part in parts)


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/routing"), help="folder of the report")
    add("--stack", default="routing-demo", help="stack file, or the name of a shipped one")
    add("--crossover", type=whole_number(1), help="instead of the stack's crossover_streams")
    add("--steps", type=steps_of, default=steps_of(STEPS), help=f"streams by step ({STEPS})")
    add("--rounds", type=whole_number(1), default=5, help="ramps of each arm")
    add("--minutes", type=float, default=22.0, help="of load; the stack's start is not in it")
    add("--prompts", default="demo-code", help="a shipped set or a file")
    add("--max-tokens", type=whole_number(1), default=64, help="tokens of each answer")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, print the table, and write the report; status 2 where it cannot be done."""
    given = options(arguments)
    try:
        chosen = contest(given.stack, given.crossover)
        outcome = carry_out(given, chosen)
    except (ConfigError, PromptsError, ServerError, NothingMeasuredError, ValueError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    # A table would be folded where the output is a file.
    wide = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    wide.print(as_table(outcome))
    console.print(f"{headline(outcome.steps)}.")
    for file in write_report(outcome, given.out):
        console.print(str(file), soft_wrap=True, markup=False)


def carry_out(given: argparse.Namespace, chosen: Contest) -> Outcome:
    """Start the stack, measure, and end the stack whatever happens."""
    shape = shape_of(given.steps, given.rounds, given.minutes)
    prompts = load_prompts(given.prompts)
    given.out.mkdir(parents=True, exist_ok=True)

    def told(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    told(f"{chosen.model}, {settings_in_words(chosen)}")
    told(f"{len(shape.streams)} steps of {shape.step_s:g} s, {given.rounds} rounds of three ramps")
    variants = (chosen.drafting, chosen.plain)
    with (
        handled((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler),
        started(chosen.stack, variants, given.out / STACK_LOG, told) as url,
    ):
        rounds = asyncio.run(
            run_rounds(chosen, url, shape, given.rounds, prompts, given.max_tokens, told)
        )
    return Outcome(
        contest=chosen,
        shape=shape,
        rounds=rounds,
        steps=figures_of(rounds, chosen.drafting),
        max_tokens=given.max_tokens,
        prompts=given.prompts,
        began=date.today().isoformat(),
        machine=machine_facts(),
        commit=commit(),
        command=shlex.join(["python", "loadtests/routing.py", *sys.argv[1:]]),
    )


if __name__ == "__main__":
    main()
