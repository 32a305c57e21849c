"""Streams that come and go, and the replicas that Ray Serve runs for them.

    python loadtests/autoscaling.py --out DIR --steps 0:10,1:60,8:120,1:60,0:60

Each step is a number of requests in flight and for how many seconds. For the stack that runs on
this machine (`moe-serving up autoscaled`); `DIR` gets `replicas.csv`, one line a second,
`requests.jsonl` and `autoscaling.svg`. Owns the load over time, the samples and the picture.
Leaves requests to `serving.studies.client`, whose records these are, and when to scale to Serve.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import accumulate, cycle, pairwise
from pathlib import Path
from typing import NamedTuple

from serving.studies.client import ApiFailureError, Client, Result, prompt_request
from serving.studies.prompts import Prompt, load_prompts
from serving.studies.recording import Sent, as_record
from serving.studies.records import RequestRecord, append_request, read_requests

# How soon a stream that ended is followed by the next.
TICK_S = 0.02
SAMPLE_EVERY_S = 1.0
SAMPLES = "replicas.csv"
PICTURE = "autoscaling.svg"


class Step(NamedTuple):
    """So many requests in flight for so long."""

    streams: int
    seconds: float


class Sample(NamedTuple):
    """Replicas at one moment, as Ray Serve's controller tells them."""

    seconds: float
    """Since the beginning."""
    streams: int
    """Requests meant to be in flight."""
    running: int
    wanted: int
    """Replicas that Serve aims at."""


def steps_of(text: str) -> tuple[Step, ...]:
    """The steps in `0:10,1:60`; raises ArgumentTypeError."""
    steps = []
    for part in text.split(","):
        streams, _, seconds = part.partition(":")
        if not (streams.strip().isdecimal() and seconds.strip().isdecimal() and int(seconds)):
            raise argparse.ArgumentTypeError(
                f"found {part!r}; write streams:seconds, as in 0:10,1:60,8:120"
            )
        steps.append(Step(int(streams), int(seconds)))
    return tuple(steps)


def streams_at(steps: Sequence[Step], seconds: float) -> int | None:
    """Requests that should be in flight; None when the last step is over."""
    for step, end in zip(steps, accumulate(step.seconds for step in steps), strict=True):
        if seconds < end:
            return step.streams
    return None


async def drive(wanted: Callable[[], int | None], ask: Callable[[int], Awaitable[None]]) -> None:
    """Keep as many calls of `ask` going as are wanted; return when none is and all have ended."""
    going: set[asyncio.Task[None]] = set()
    while (streams := wanted()) is not None:
        for task in [task for task in going if task.done()]:
            going.discard(task)
            task.result()
        for _ in range(streams - len(going)):
            going.add(asyncio.ensure_future(ask(streams)))
        await asyncio.sleep(TICK_S)
    await asyncio.gather(*going)


async def sample(
    wanted: Callable[[], int | None],
    replicas: Callable[[], tuple[int, int]],
    clock: Callable[[], float],
    file: Path,
) -> None:
    """Write a line each second until nothing is wanted any more; `clock` counts from the start."""
    with file.open("w", newline="", encoding="utf-8") as opened:
        lines = csv.writer(opened)
        lines.writerow(Sample._fields)
        while (streams := wanted()) is not None:
            running, aimed = await asyncio.to_thread(replicas)
            lines.writerow((f"{clock():.1f}", streams, running, aimed))
            opened.flush()
            await asyncio.sleep(SAMPLE_EVERY_S)


def read_samples(folder: Path) -> list[Sample]:
    """What `sample` wrote."""
    with (folder / SAMPLES).open(newline="", encoding="utf-8") as opened:
        return [
            Sample(float(row["seconds"]), *(int(row[name]) for name in Sample._fields[1:]))
            for row in csv.DictReader(opened)
        ]


class Asking:
    """Requests with one prompt after the other, each recorded in `folder`."""

    def __init__(
        self, client: Client, model: str, prompts: Iterable[Prompt], tokens: int, folder: Path
    ) -> None:
        self._client = client
        self._model = model
        self._prompts = cycle(prompts)
        self._tokens = tokens
        self._folder = folder

    async def __call__(self, streams: int) -> None:
        """Ask once; a failure is a record too."""
        prompt = next(self._prompts)
        sent = Sent(
            cell="autoscaling",
            round=0,
            arm=self._model,
            streams=streams,
            category=prompt.category,
            prompt=prompt.id,
            temperature=0,
            max_tokens=self._tokens,
            sent_at=time.time(),
        )
        request = prompt_request(
            self._model, prompt, max_tokens=self._tokens, temperature=0, ignore_eos=True
        )
        stream = self._client.stream(request)
        ended: Result | ApiFailureError
        try:
            async for _ in stream:
                pass
            ended = stream.result
        except ApiFailureError as error:
            ended = error
        append_request(self._folder, as_record(sent, ended))


async def measure(
    url: str,
    model: str,
    steps: Sequence[Step],
    tokens: int,
    replicas: Callable[[], tuple[int, int]],
    folder: Path,
) -> None:
    """Send the load of `steps` to `url`, and record it and the replicas in `folder`."""
    began = time.monotonic()

    def clock() -> float:
        return time.monotonic() - began

    def wanted() -> int | None:
        return streams_at(steps, clock())

    async with Client(url) as client:
        asking = Asking(client, model, load_prompts("demo-code"), tokens, folder)
        await asyncio.gather(
            drive(wanted, asking), sample(wanted, replicas, clock, folder / SAMPLES)
        )


def connect(model: str) -> tuple[str, Callable[[], tuple[int, int]]]:
    """The stack that runs here: its API, and what counts the model's running and wanted replicas.

    `model` as in a request: the default variant's replicas, or those of `model@variant`.
    """
    from serving.stack import history, runtime
    from serving.stack.engine_plan import plan_engines

    run, stack = runtime.running(), history.current()
    if run is None or stack is None:
        sys.exit("no stack runs here; start one with `moe-serving up autoscaled --detach`")
    name, _, variant = model.partition("@")
    apps = [
        plan.app_name
        for plan in plan_engines(stack)
        if plan.model_id == name and (plan.variant == variant if variant else plan.is_default)
    ]
    if not apps:
        sys.exit(f"--model: {model!r} is not in this stack; name one of its models by its id")
    # Ray reads these when it is imported.
    os.environ.update(run["environment"])
    import ray

    from serving.stack.watch import applications, replicas_of

    ray.init(address=run["address"], namespace="serve", log_to_driver=False)

    def replicas() -> tuple[int, int]:
        return replicas_of(applications()[apps[0]])

    return f"{run['url']}/v1", replicas


def draw(folder: Path) -> None:
    """Draw the samples and the requests of `folder` into its picture."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    samples, records = read_samples(folder), list(read_requests(folder))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "autoscaling", "font.size": 9}):
        figure = Figure(figsize=(6.4, 4.6), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        seconds = [each.seconds for each in samples]
        for label, values, style in (
            ("requests in flight, by design", [s.streams for s in samples], {"color": "#9a9a9a"}),
            ("replicas wanted", [s.wanted for s in samples], {"color": "#e69f00", "ls": "--"}),
            ("replicas running", [s.running for s in samples], {"color": "#0072b2", "lw": 2}),
        ):
            above.step(seconds, values, where="post", label=label, **style)
        above.set_ylim(bottom=0)
        above.yaxis.get_major_locator().set_params(integer=True)
        figure.legend(frameon=False, loc="outside upper left", ncols=3)
        # Requests are by Unix time: the first was sent when streams were first wanted.
        first = next((each.seconds for each in samples if each.streams), 0.0)
        waits = _waits(records, first)
        below.plot([at for at, _ in waits], [wait for _, wait in waits], ".", color="#0072b2")
        below.set_yscale("log")
        below.set_ylabel("s to first text")
        below.set_xlabel("s")
        figure.savefig(folder / PICTURE, metadata={"Date": None})


def _waits(records: Sequence[RequestRecord], first: float) -> list[tuple[float, float]]:
    """When each answered request was sent, in seconds of the samples, and its TTFT."""
    origin = min((record.sent_at for record in records), default=0.0) - first
    return [(r.sent_at - origin, r.ttft_s) for r in records if r.ttft_s is not None]


def summary(folder: Path) -> str:
    """The run in a few lines."""
    samples, records = read_samples(folder), list(read_requests(folder))
    counts = [each.running for each in samples]
    turns = [counts[0]] + [b for a, b in pairwise(counts) if a != b]
    whole = [record for record in records if record.ok]
    waits = sorted(record.ttft_s or 0.0 for record in whole)
    lines = [
        f"replicas running: {' -> '.join(map(str, turns))}",
        f"requests: {len(records)}, {len(records) - len(whole)} failed",
    ]
    if waits:
        lines.append(
            f"to first text: median {waits[len(waits) // 2]:.2f} s, most {waits[-1]:.1f} s"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, draw, and say what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a new folder for the results")
    parser.add_argument("--model", default="tiny-moe", help="name to ask for")
    parser.add_argument("--steps", type=steps_of, default=steps_of("0:10,1:60,8:120,1:60,0:60"))
    parser.add_argument("--max-tokens", type=int, default=64, help="length of each answer")
    options = parser.parse_args()
    try:
        options.out.mkdir(parents=True)
    except OSError as error:
        parser.error(f"--out: {options.out}: {error.strerror}; name a folder that is not there yet")
    url, replicas = connect(options.model)
    asyncio.run(
        measure(url, options.model, options.steps, options.max_tokens, replicas, options.out)
    )
    draw(options.out)
    print(summary(options.out))


if __name__ == "__main__":
    main()
