"""The study as a whole: start four servers, measure, end them whatever happens.

Owns the order and the end of every process. Leaves each step to its own module.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from serving.signals import handled
from serving.studies.overhead.measure import Measured, run_rounds
from serving.studies.overhead.servers import LABELS, Server, four_servers, plain_stack

# Each stream is a connection and a task of this one process.
MAX_STREAMS = 256


def run_study(
    stack: str, streams: Sequence[int], rounds: int, report: Callable[[str], None]
) -> tuple[str, Measured]:
    """Compare the four servers on the plain variant of the first model of `stack`.

    Returns the model's id and all readings. `report` gets a line per step. Raises
    ServerError or ConfigError; every process started is ended first.
    """
    with folder() as place, sigterm_as_exit():
        file, plan = plain_stack(stack, place)
        servers = four_servers(file, plan, place)
        try:
            for server in servers:
                _start(server, plan.model_id, report)
            measured = asyncio.run(run_rounds(servers, plan.model_id, streams, rounds, report))
            return plan.model_id, measured
        finally:
            stop_all(servers, report)


def parse_streams(text: str) -> tuple[int, ...]:
    """The numbers of `1,8,16`; raises ValueError with the cure."""
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if part.isdecimal() and len(part) < 6]
    if len(numbers) != len(parts) or not all(1 <= number <= MAX_STREAMS for number in numbers):
        raise ValueError(
            f"--streams: found {text!r}; write numbers from 1 to {MAX_STREAMS}, as 1,8,16"
        )
    return tuple(dict.fromkeys(numbers))


def _start(server: Server, model: str, report: Callable[[str], None]) -> None:
    began = time.monotonic()
    report(f"{LABELS[server.name]}: starting")
    server.start()
    server.wait_until_ready(model)
    report(f"{LABELS[server.name]}: ready after {time.monotonic() - began:.0f} s")


def stop_all(servers: Sequence[Server], report: Callable[[str], None]) -> None:
    """End every process of these servers; Ctrl-C is held off meanwhile."""
    # An impatient second Ctrl-C would leave engines behind.
    with handled((signal.SIGINT,), signal.SIG_IGN):
        report("ending the servers")
        for server in servers:
            server.stop()


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder for the length of the block."""
    # Below /tmp: a socket's path has at most 107 bytes, and Ray's are long.
    place = Path(tempfile.mkdtemp(prefix="ms-", dir="/tmp"))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def sigterm_as_exit() -> AbstractContextManager[None]:
    """SIGTERM ends the block as an exit does, through every `finally`."""
    return handled((signal.SIGTERM,), lambda *_: sys.exit(143))
