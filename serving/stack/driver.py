"""The process that speaks to Ray and Serve: `python -m serving.stack.driver ACTION`.

A process of its own, so that the command stays quick to answer, can be
interrupted at any moment, and shows none of what Ray and vLLM print: those lines
go to this process's stderr, which is the stack's log file. It imports Ray Serve
while Ray still starts, then reads one request from stdin (a JSON line) and
writes events to stdout (see `events`). Leaves the work to `deploy`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from serving.stack import history
from serving.stack.events import Event, Failure, Outcome, Request
from serving.stack.update import UpdateRefused

# Lines of an engine's own output that are copied into the log before its folder goes.
ENGINE_LINES = 200


def main() -> int:
    """Do one action; returns the exit code."""
    out = _claim_stdout()
    signal.signal(signal.SIGTERM, _interrupt)

    def emit(event: Event) -> None:
        out.write(event.model_dump_json() + "\n")
        out.flush()

    request = None
    try:
        work = ACTIONS[sys.argv[1]]()
        request = Request.model_validate_json(sys.stdin.readline())
        _connect(request.address)
        result = work(request, emit)
    except KeyboardInterrupt:
        return 1
    except Exception as error:
        traceback.print_exc()
        refused = isinstance(error, UpdateRefused)
        emit(Failure(text=_plain(error, request), refused=refused))
        return 1
    emit(result)
    return 0


Work = Callable[[Request, Callable[[Event], None]], Event]


def _start() -> Work:
    from serving.stack import deploy

    return lambda request, emit: deploy.start(history.from_json(request.stack), emit)


def _change() -> Work:
    from serving.stack import deploy

    return lambda request, emit: deploy.change(
        history.from_json(request.before), history.from_json(request.stack), emit
    )


def _status() -> Work:
    from serving.stack import status

    return lambda request, _: status.read(history.from_json(request.stack))


def _end() -> Work:
    from serving.stack import ending

    def work(request: Request, _: Callable[[Event], None]) -> Event:
        ending.end(request.within_s)
        return Outcome(text="ended")

    return work


# Each imports what it needs when it is chosen, before Ray need be up.
ACTIONS: dict[str, Callable[[], Work]] = {
    "start": _start,
    "change": _change,
    "status": _status,
    "end": _end,
}


def _connect(address: str) -> None:
    import ray

    ray.init(address=address, namespace="serve", logging_level=logging.ERROR, log_to_driver=False)


def _claim_stdout() -> IO[str]:
    """Stdout for events alone; everything else that is printed goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _interrupt(*_: object) -> None:
    # Once: what is undone after it must not be cut short.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _plain(error: Exception, request: Request | None) -> str:
    """The error as one readable text; the trace is in the log."""
    from serving.stack.watch import DeployError

    if isinstance(error, DeployError) and request is not None:
        return f"{error}{_root_cause(Path(request.temp), error.workers)}"
    known = isinstance(error, DeployError | UpdateRefused)
    return str(error) if known else f"{type(error).__name__}: {error}"


def _root_cause(temp: Path, workers: Sequence[str]) -> str:
    """What the engine's own processes wrote last; vLLM's error only points to it."""
    found = ""
    for worker in workers:
        for path in sorted((temp / "session_latest" / "logs").glob(f"worker-{worker}-*")):
            lines = path.read_text(errors="replace").splitlines()[-ENGINE_LINES:]
            print(f"--- {path.name}", *lines, sep="\n", file=sys.stderr)
            errors = [line for line in lines if "Error: " in line and "root cause" not in line]
            found = errors[-1].strip() if errors else found
    return f"\nThe engine's own last error: {found}" if found else ""


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Without Ray's own farewell, which takes seconds; it notices a driver that is gone.
    os._exit(code)
