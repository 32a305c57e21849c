"""A ramp: a number of streams that changes step by step, and the tokens of each step.

Owns the closed loop (each stream sends its next request when its last has ended) and to which
step a token counts. Streams go on from step to step as clients do, so nothing stands still
between two steps; what the change itself does to throughput is left out of the step's window.
Leaves requests to the caller and their protocol to `client`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from serving.studies.client import ApiFailureError, Client, Request

VARIANT_HEADER = "x-moe-serving-variant"
# A stream whose request failed does not ask again at once: refusals would come by the thousand.
AFTER_FAILURE_S = 0.5


@dataclass(frozen=True, slots=True)
class Shape:
    """The steps of a ramp. A step's first `settle_s` seconds count for nothing."""

    streams: tuple[int, ...]
    step_s: float
    settle_s: float

    @property
    def seconds(self) -> float:
        """All steps together."""
        return self.step_s * len(self.streams)

    @property
    def window_s(self) -> float:
        """What counts of each step."""
        return self.step_s - self.settle_s

    def step_at(self, second: float) -> int | None:
        """The step whose window holds this second since the ramp's start; None for none."""
        step, into = divmod(second, self.step_s)
        if not 0 <= step < len(self.streams) or into < self.settle_s:
            return None
        return int(step)

    def spans(self, stream: int) -> Iterator[tuple[float, float]]:
        """When the stream of this number (from 0) runs: seconds since the ramp's start."""
        begun: int | None = None
        for step, streams in enumerate((*self.streams, 0)):
            runs = stream < streams
            if runs and begun is None:
                begun = step
            elif not runs and begun is not None:
                yield begun * self.step_s, step * self.step_s
                begun = None


@dataclass(slots=True)
class StepCount:
    """What one step of one ramp brought."""

    streams: int
    window_s: float
    tokens: dict[str, float] = field(default_factory=dict)
    """Output tokens by the variant that answered."""
    failures: int = 0
    """Requests that failed, in the whole step."""

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all streams per second of the window."""
        return sum(self.tokens.values()) / self.window_s


class Tally:
    """Counts tokens by step. Times are seconds since the ramp's start."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self.steps = [StepCount(streams, shape.window_s) for streams in shape.streams]

    def add(self, pieces: Sequence[float], tokens: int, variant: str) -> None:
        """A whole answer of `tokens` tokens that came at these times, the same number each."""
        for second in pieces:
            step = self._shape.step_at(second)
            if step is not None:
                counted = self.steps[step].tokens
                counted[variant] = counted.get(variant, 0.0) + tokens / len(pieces)

    def fail(self, second: float) -> None:
        """A request that failed; after the last step it counts to that one."""
        step = int(second // self._shape.step_s)
        self.steps[min(step, len(self.steps) - 1)].failures += 1


async def run_ramp(
    client: Client,
    request: Callable[[int], Request],
    shape: Shape,
    clock: Callable[[], float] = time.perf_counter,
) -> list[StepCount]:
    """One ramp: `request(i)` is the i-th one sent. Requests under way at its end are finished."""
    tally, began = Tally(shape), clock()
    sent = iter(range(10**9))

    async def stream(number: int) -> None:
        for begins, ends in shape.spans(number):
            await asyncio.sleep(max(0.0, began + begins - clock()))
            while clock() - began < ends:
                await ask()

    async def ask() -> None:
        answer = client.stream(request(next(sent)))
        pieces = []
        try:
            async for _ in answer:
                pieces.append(clock() - began)
        except ApiFailureError:
            tally.fail(clock() - began)
            await asyncio.sleep(AFTER_FAILURE_S)
            return
        result = answer.result
        tally.add(pieces, result.completion_tokens, result.headers.get(VARIANT_HEADER, ""))

    async with asyncio.TaskGroup() as group:
        for number in range(max(shape.streams)):
            group.create_task(stream(number))
    return tally.steps
