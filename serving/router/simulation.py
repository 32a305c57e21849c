"""What the router does at a size that no machine here has: `python -m serving.router.simulation`.

Owns the fleet, the traffic and the figures. Every decision is made by the same `Router` that
the gateway calls; engines are two functions, the time of a decode step by running requests.
Leaves out what the choice does not rest on: prefill, the network, engines that fail.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from serving.router.choose import Router
from serving.router.request import RouteRequest
from serving.router.rules import Load
from serving.router.settings import Routing
from serving.router.table import ModelRoute, VariantRoute

MTP, PLAIN = "mtp", "plain"
# Qwen3.6-27B in INT4 on an RTX 3090, 2,048 tokens of context: what `moe-serving plan` predicts
# (milliseconds of a step by running requests, n = 0 and n = 3, mixed text). Not measured.
PLAIN_STEPS = "1:19.5,2:20.1,4:21.2,8:23.5,12:25.7,16:28.0,20:30.5,24:36.2,32:47.6,64:93.2"
MTP_STEPS = "1:28.9,2:30.1,4:32.5,8:48.0,12:66.6,16:85.2,20:103.8,24:122.9,32:161.1,64:314.0"
MTP_TOKENS = 3.17
SLOTS = 64
# Of all requests: answers held to a grammar, and answers too short for drafting to pay.
STRUCTURED, SHORT = 0.05, 0.1
SHORT_TOKENS, MEAN_TOKENS = 16, 128
SESSIONS = 5_000
# Requests in flight per replica from which a line of the table begins; below 1 it has none.
LEVELS = (0, 1, 2, 4, 8, 16, 24)

Speed = Callable[[int], float]
"""Tokens per second of each of so many running requests."""


def speed_of(steps: str, tokens_per_step: float) -> Speed:
    """The speed of an engine whose step takes so many milliseconds, as "1:19.5,8:23.5".

    In between by straight lines, beyond the last by the last one's slope. Raises ValueError.
    """
    try:
        pairs = [point.split(":") for point in steps.split(",")]
        points = sorted({int(running): float(step) for running, step in pairs}.items())
        if len(points) < 2:
            raise ValueError
    except ValueError:
        cure = "write two points or more, each running:milliseconds, as 1:19.5,8:23.5"
        raise ValueError(f"found {steps!r}; {cure}") from None
    numbers = [n for n, _ in points]

    def speed(running: int) -> float:
        place = min(max(bisect_right(numbers, running), 1), len(points) - 1)
        (low, first), (high, last) = points[place - 1 : place + 1]
        step = first + (last - first) * (running - low) / (high - low)
        return 1000 * tokens_per_step / step

    return speed


def crossover(mtp: Speed, plain: Speed) -> int | None:
    """From how many running requests on plain is faster; None: not up to `SLOTS`."""
    return next((n for n in range(1, SLOTS + 1) if plain(n) > mtp(n)), None)


# --- engines --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Job:
    """One request on its way; times in seconds."""

    tokens: int
    sent: float
    rule: str


@dataclass(slots=True)
class _Replica:
    """One engine: its running requests share it, the others wait in order.

    `done` counts the tokens that a request would have that runs since the start; one that
    came at `done` = x is ready at x plus its own tokens.
    """

    variant: str
    speeds: list[float]
    done: float = 0.0
    at: float = 0.0
    version: int = 0
    running: list[tuple[float, int, _Job]] = field(default_factory=list)
    waiting: deque[_Job] = field(default_factory=deque)

    @property
    def rate(self) -> float:
        """Tokens per second of all running requests together."""
        return len(self.running) * self.speeds[len(self.running)]

    def advance(self, now: float) -> None:
        self.done += (now - self.at) * self.speeds[len(self.running)]
        self.at = now

    def next_end(self) -> float:
        """When the first of the running requests is ready, if none comes before."""
        return self.at + max(0.0, self.running[0][0] - self.done) / self.speeds[len(self.running)]


# --- figures --------------------------------------------------------------------------------


@dataclass(slots=True)
class Figures:
    """What one simulated run came to."""

    name: str
    requests: int = 0
    finished: int = 0
    seconds: float = 0.0
    """Simulated time from the first request to the last answer."""
    tokens_by_level: dict[int, float] = field(default_factory=lambda: dict.fromkeys(LEVELS, 0.0))
    seconds_by_level: dict[int, float] = field(default_factory=lambda: dict.fromkeys(LEVELS, 0.0))
    drafted_by_level: Counter[int] = field(default_factory=Counter)
    decided_by_level: Counter[int] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    """Seconds from arrival to a slot, of each request."""
    longest_wait: dict[str, float] = field(default_factory=dict)
    """Seconds, by the rule that chose."""
    decisions: list[float] = field(default_factory=list)
    """CPU seconds of each decision."""

    def tokens_per_s(self, level: int) -> float:
        """Of the whole fleet, while it was at this level."""
        return self.tokens_by_level[level] / (self.seconds_by_level[level] or 1.0)

    def drafting_share(self, level: int) -> float:
        """Share of the requests sent to the drafting variant at this level."""
        return self.drafted_by_level[level] / (self.decided_by_level[level] or 1)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of `values` does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# --- a run ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many engines of each variant there are, and how the router is to choose."""

    name: str
    mtp: int
    plain: int
    default: str
    routing: Routing = field(default_factory=Routing)

    def model(self) -> ModelRoute:
        """The routing table's entry."""
        drafting: dict[str, dict[str, object] | None] = {MTP: {"method": "mtp"}, PLAIN: None}
        return ModelRoute(
            id="m",
            default_variant=self.default,
            variants=tuple(
                VariantRoute(
                    variant=name,
                    app_name=name,
                    max_model_len=32_768,
                    speculative=drafts,
                    max_num_seqs=SLOTS,
                )
                for name, drafts in drafting.items()
            ),
            routing=self.routing,
        )


class Simulation:
    """One fleet under one ramp of load: 1 request in flight per replica, `peak`, and 1 again.

    The ramp goes by requests sent, so that every fleet gets the same ones: whoever ends a
    request sends the next, as far as the ramp allows.
    """

    def __init__(
        self, fleet: Fleet, speeds: dict[str, Speed], requests: int, peak: int, seed: int
    ) -> None:
        self.figures = Figures(fleet.name, requests)
        self._model = fleet.model()
        self._random = random.Random(seed)
        self._router = Router(random.Random(seed + 1).random)
        self._traffic = _traffic(random.Random(seed + 2))
        self._peak = peak
        self._size = fleet.mtp + fleet.plain
        self._replicas = {
            name: [_Replica(name, table) for _ in range(count)]
            for name, count in ((MTP, fleet.mtp), (PLAIN, fleet.plain))
            for table in [[speeds[name](max(1, running)) for running in range(SLOTS + 1)]]
        }
        self._loads = {name: Load(0, len(each)) for name, each in self._replicas.items()}
        self._ends: list[tuple[float, int, _Replica, int]] = []
        self._number = itertools.count()
        self._now = self._rate = 0.0
        self._sent = self._in_flight = 0

    def run(self) -> Figures:
        """Send all requests and wait for the last answer."""
        figures = self.figures
        self._send()
        while self._ends:
            at, _, replica, version = heapq.heappop(self._ends)
            if version == replica.version:
                self._pass(at)
                self._end_one(replica)
                self._send()
        figures.seconds = self._now
        return figures

    def _level(self) -> int:
        return LEVELS[bisect_right(LEVELS, self._in_flight / self._size) - 1]

    def _pass(self, at: float) -> None:
        level, seconds = self._level(), at - self._now
        self.figures.tokens_by_level[level] += seconds * self._rate
        self.figures.seconds_by_level[level] += seconds
        self._now = at

    def _send(self) -> None:
        total = self.figures.requests
        while self._sent < total:
            distance = abs(2 * self._sent / total - 1)
            if self._in_flight >= self._size * (1 + (self._peak - 1) * (1 - distance)):
                return
            self._sent += 1
            self._in_flight += 1
            self._start(*next(self._traffic))

    def _start(self, request: RouteRequest, tokens: int) -> None:
        figures, level = self.figures, self._level()
        started = time.thread_time()
        decision = self._router.choose(self._model, request, self._loads, self._now)
        figures.decisions.append(time.thread_time() - started)
        figures.rules[decision.rule] += 1
        figures.decided_by_level[level] += 1
        figures.drafted_by_level[level] += decision.variant == MTP
        load = self._loads[decision.variant]
        self._loads[decision.variant] = load._replace(running=load.running + 1)
        replica = self._balance(self._replicas[decision.variant])
        replica.waiting.append(_Job(tokens, self._now, decision.rule))
        self._change(replica)

    def _balance(self, replicas: list[_Replica]) -> _Replica:
        """The less busy one of two drawn at random, as Ray Serve does it."""
        first, second = self._random.choice(replicas), self._random.choice(replicas)
        return min(first, second, key=lambda each: len(each.running) + len(each.waiting))

    def _end_one(self, replica: _Replica) -> None:
        self._change(replica, ends=True)
        self.figures.finished += 1
        self._in_flight -= 1
        load = self._loads[replica.variant]
        self._loads[replica.variant] = load._replace(running=load.running - 1)

    def _change(self, replica: _Replica, *, ends: bool = False) -> None:
        """Take the request that is ready out, those that waited in, and look ahead again."""
        self._rate -= replica.rate
        replica.advance(self._now)
        if ends:
            heapq.heappop(replica.running)
        while replica.waiting and len(replica.running) < SLOTS:
            job = replica.waiting.popleft()
            self._note_wait(job.rule, self._now - job.sent)
            entry = (replica.done + job.tokens, next(self._number), job)
            heapq.heappush(replica.running, entry)
        self._rate += replica.rate
        replica.version += 1
        if replica.running:
            end = (replica.next_end(), next(self._number), replica, replica.version)
            heapq.heappush(self._ends, end)

    def _note_wait(self, rule: str, waited: float) -> None:
        self.figures.waits.append(waited)
        longest = self.figures.longest_wait
        longest[rule] = max(waited, longest.get(rule, 0.0))


def _traffic(draw: random.Random) -> Iterator[tuple[RouteRequest, int]]:
    """Requests and the length of their answers, in tokens."""
    while True:
        kind, session = draw.random(), f"session {draw.randrange(SESSIONS)}"
        tokens = 1 + int(draw.expovariate(1 / MEAN_TOKENS))
        request = RouteRequest("m", max_tokens=1024, prompt_tokens=512, session=session)
        if kind < STRUCTURED:
            yield replace(request, structured=True), tokens
        elif kind < STRUCTURED + SHORT:
            yield replace(request, max_tokens=SHORT_TOKENS), min(tokens, SHORT_TOKENS)
        else:
            yield request, tokens


# --- the report -----------------------------------------------------------------------------


def fleets(replicas: int, crossover_streams: int | None) -> tuple[Fleet, ...]:
    """The same cards four times: drafting, plain, half of each routed, half of each not."""
    half = replicas // 2
    routed = Routing(
        crossover_streams={MTP: crossover_streams},
        structured="plain",
        break_even_output_tokens=SHORT_TOKENS + 1,
    )
    return (
        Fleet("static, all mtp", replicas, 0, MTP),
        Fleet("static, all plain", 0, replicas, PLAIN),
        Fleet("load-aware, half each", replicas - half, half, MTP, routed),
        Fleet("static mtp, half idle", replicas - half, half, MTP),
    )


def table(found: Sequence[Figures], replicas: int) -> str:
    """Tokens per second and replica, by load; beside it the share that was drafted."""
    routed = found[2]
    lines = ["in flight   " + "   ".join(each.name for each in found) + "   sent to mtp"]
    for level, end in zip(LEVELS[1:], (*LEVELS[2:], None), strict=True):
        cells = [f"{each.tokens_per_s(level) / replicas:{len(each.name)}.0f}" for each in found]
        name = f"{level} to {end}" if end else f"{level} on"
        lines.append(
            f"{name:<9}   " + "   ".join(cells) + f"   {routed.drafting_share(level):11.0%}"
        )
    seconds = [f"{each.seconds:{len(each.name)}.0f}" for each in found]
    lines.append("seconds     " + "   ".join(seconds))
    return "\n".join(lines)


def summary(routed: Figures) -> str:
    """Cost of the decisions, waits, and whether anyone starved."""
    cpu = [each * 1e6 for each in routed.decisions]
    waits = ", ".join(
        f"{share:.0%} within {quantile(routed.waits, share):.2f} s" for share in (0.5, 0.99)
    )
    longest = ", ".join(
        f"{rule} {seconds:.2f} s" for rule, seconds in sorted(routed.longest_wait.items())
    )
    rules = ", ".join(f"{rule} {n:,}" for rule, n in routed.rules.most_common())
    return (
        f"{routed.name}: {routed.finished:,} of {routed.requests:,} requests answered\n"
        f"  a decision: {statistics.mean(cpu):.1f} us of CPU on average, "
        f"99 % within {quantile(cpu, 0.99):.1f}\n"
        f"  chosen by: {rules}\n"
        f"  waits for a slot: {waits}; longest: {longest}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1_000, help="cards in all")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--peak", type=int, default=32, help="in flight per replica at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", default=PLAIN_STEPS, help="running:milliseconds of a step, ...")
    parser.add_argument("--mtp", default=MTP_STEPS, help="the same, while drafting")
    parser.add_argument("--mtp-tokens", type=float, default=MTP_TOKENS, help="per step")
    parser.add_argument("--crossover", type=int, help="running per replica; where speeds cross")
    given = parser.parse_args(arguments)
    if given.replicas < 2 or given.requests < 1 or given.peak < 1:
        parser.error("two replicas, one request and a peak of one are the least")
    try:
        speeds = {MTP: speed_of(given.mtp, given.mtp_tokens), PLAIN: speed_of(given.plain, 1)}
    except ValueError as error:
        parser.error(str(error))
    streams = given.crossover or crossover(speeds[MTP], speeds[PLAIN])
    print(
        f"{given.replicas:,} replicas, {given.requests:,} requests, 1 to {given.peak} to 1 in "
        f"flight per replica, seed {given.seed}; crossover {streams}"
    )
    found = [
        Simulation(fleet, speeds, given.requests, given.peak, given.seed).run()
        for fleet in fleets(given.replicas, streams)
    ]
    print("\ntokens/s per replica, while so many requests per replica were in flight")
    print(f"{table(found, given.replicas)}\n\n{summary(found[2])}")


if __name__ == "__main__":
    main()
