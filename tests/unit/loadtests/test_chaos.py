"""Schedule, verdict, counts and report of the chaos run, and its load on a server that fails."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import aiohttp
import psutil
import pytest
from aiohttp import web
from rich.console import Console

from serving.stack.environment import MARK
from serving.studies.chaos import faults as chaos_faults
from serving.studies.chaos import run as chaos_run
from serving.studies.chaos.faults import Fault, inject, wait_until_whole
from serving.studies.chaos.load import Asked, Load, Request, send
from serving.studies.chaos.processes import (
    NoStackError,
    Parts,
    Replica,
    StackProcesses,
    ended,
    finished_requests,
    total,
)
from serving.studies.chaos.report import (
    as_json,
    by_cause,
    failures,
    findings,
    goals,
    longest_stall_s,
    reached,
    rendered,
)
from serving.studies.chaos.run import Outcome, Plan, Suffered
from serving.studies.chaos.schedule import PAUSE_S, FaultKind, Planned, schedule
from serving.studies.chaos.verdict import BROKEN_WITHIN_S, during, unavoidable

ASKED = Asked(
    id="chaos-a-1",
    model="tiny",
    path="/v1/completions",
    body={"model": "tiny", "prompt": "p", "stream": True},
    leaves_after_s=None,
    keeps_connection=True,
)
WHOLE = replace(ASKED, body={**ASKED.body, "stream": False})


# --- the schedule ---------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_faults() -> None:
    first, again, other = (list(itertools.islice(schedule(seed), 20)) for seed in (7, 7, 8))

    assert first == again
    assert first != other


def test_every_kind_comes_once_before_any_comes_again() -> None:
    drawn = list(itertools.islice(schedule(3), 2 * len(FaultKind)))

    for half in (drawn[: len(FaultKind)], drawn[len(FaultKind) :]):
        assert {each.kind for each in half} == set(FaultKind)
    assert all(PAUSE_S[0] <= each.pause_s <= PAUSE_S[1] for each in drawn)


@pytest.mark.parametrize(("draw", "count", "place"), [(0.0, 3, 0), (0.99, 3, 2), (0.5, 2, 1)])
def test_a_draw_chooses_among_whatever_is_there(draw: float, count: int, place: int) -> None:
    assert Planned(FaultKind.CORE_KILLED, 1, draw).choose(count) == place


def test_a_fault_that_finds_nothing_says_which() -> None:
    with pytest.raises(ValueError, match="HAProxy killed"):
        Planned(FaultKind.PROXY_KILLED, 1, 0.5).choose(0)


# --- whose fault a failure is ---------------------------------------------------------------


def fault(kind: FaultKind, at: float = 100.0, replica: str = "r1") -> Fault:
    return Fault(kind, f"engine {replica}", replica, began=at, done=at + 0.1)


def failed(**changes: object) -> Request:
    """A stream of r1 that ran from 90 to 101 and failed."""
    request = Request("chaos-a-1", "tiny", True, sent_at=90.0, head_at=91.0, ended_at=101.0)
    request.replica, request.cause = "r1", "stream ended by engine_died"
    for name, value in changes.items():
        setattr(request, name, value)
    return request


@pytest.mark.parametrize(
    "kind", [FaultKind.CORE_KILLED, FaultKind.REPLICA_KILLED, FaultKind.CORE_HUNG]
)
def test_a_stream_that_ran_on_the_replica_is_lost_with_it(kind: FaultKind) -> None:
    lost = fault(kind)

    assert unavoidable(failed(), [lost]) is lost
    assert unavoidable(failed(ended_at=130.0), [lost]) is lost


@pytest.mark.parametrize(
    "changes",
    [
        {"replica": "r2"},
        {"replica": ""},
        {"streamed": False},
        {"head_at": None},
        {"head_at": 100.5},
        {"sent_at": 100.5, "head_at": 100.6},
        {"ended_at": 99.0},
    ],
    ids=["elsewhere", "nowhere", "whole", "not begun", "begun after", "sent after", "before"],
)
def test_any_other_request_of_that_time_is_a_finding(changes: dict[str, object]) -> None:
    assert unavoidable(failed(**changes), [fault(FaultKind.CORE_KILLED)]) is None


def test_what_a_replica_of_unknown_name_took_along_is_not_guessed() -> None:
    assert unavoidable(failed(replica=""), [fault(FaultKind.CORE_KILLED, replica="")]) is None


@pytest.mark.parametrize("kind", [FaultKind.GATEWAY_KILLED, FaultKind.PROXY_KILLED])
def test_what_was_inside_a_gateway_or_haproxy_is_lost_with_it(kind: FaultKind) -> None:
    lost = fault(kind, replica="")
    whole = failed(streamed=False, head_at=None, replica="")

    assert unavoidable(whole, [lost]) is lost
    assert unavoidable(failed(ended_at=100.1 + BROKEN_WITHIN_S + 1), [lost]) is None
    assert unavoidable(failed(sent_at=100.2), [lost]) is None


@pytest.mark.parametrize("kind", [FaultKind.CORE_SLOW, FaultKind.CONTROLLER_KILLED])
def test_a_slow_core_and_a_lost_controller_excuse_nothing(kind: FaultKind) -> None:
    assert unavoidable(failed(), [fault(kind)]) is None


def test_a_finding_is_told_by_the_last_fault_before_it() -> None:
    first, second = fault(FaultKind.CORE_SLOW, 50), fault(FaultKind.CORE_KILLED, 100)

    assert during(failed(ended_at=99.0), [first, second]) is first
    assert during(failed(ended_at=101.0), [first, second]) is second
    assert during(failed(ended_at=10.0), [first, second]) is None


# --- what a run says ------------------------------------------------------------------------


def answered(**changes: object) -> Request:
    return failed(outcome="answered", cause="", **changes)


def outcome_of(*requests: Request, **changes: object) -> Outcome:
    found = Outcome(Plan(seed=1, seconds=60), began=80.0, requests=list(requests), ended=140.0)
    found.suffered = [Suffered(fault(FaultKind.CORE_KILLED), 12.0)]
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def test_a_run_whose_only_failures_were_unavoidable_reaches_its_goals() -> None:
    good = outcome_of(failed(), answered(longest_stall_s=2.5))

    assert reached(good)
    assert len(failures(good)) == 1 and findings(good) == []
    assert longest_stall_s(good) == 2.5


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"requests": [failed(replica="r2")]}, "failures that need not have been"),
        ({"leases": 1.0}, "slots leaked"),
        ({"in_engines": 1.0}, "slots leaked"),
        ({"engine_answers": 9.0, "client_answers": 6, "unclear": 2}, "duplicates"),
        ({"requests": [answered(foreign=True)]}, "answers to another request"),
        ({"unrecovered": "1 of 2 gateways"}, "whole again after each fault"),
    ],
)
def test_each_goal_can_be_missed(changes: dict[str, object], missed: str) -> None:
    bad = outcome_of(**changes)

    assert [goal.name for goal in goals(bad) if not goal.reached] == [missed]
    assert not reached(bad)


def test_requests_that_clients_left_may_have_been_answered_in_the_engine() -> None:
    assert outcome_of(engine_answers=8.0, client_answers=6, unclear=2).duplicates == 0
    assert outcome_of(engine_answers=9.0, client_answers=6, unclear=2).duplicates == 1


def test_failures_are_counted_by_cause_and_by_what_they_came_with() -> None:
    found = outcome_of(failed(), failed(replica="r2"), failed(ended_at=90.5, cause="HTTP 429 x"))

    assert by_cause(found) == {
        "stream ended by engine_died": Counter(
            {"lost with: engine core killed": 1, "after: engine core killed": 1}
        ),
        "HTTP 429 x": Counter({"after: no fault before it": 1}),
    }


def test_the_stall_of_a_stream_that_failed_is_not_the_longest() -> None:
    assert longest_stall_s(outcome_of(failed(longest_stall_s=9.0))) == 0


def test_a_run_is_told_as_text_and_as_json() -> None:
    found = outcome_of(failed(), failed(replica="r2"), answered(), retries=3.0)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(rendered(found))
    told = json.loads(json.dumps(as_json(found)))

    assert "3 requests, 1 answered, 0 left by their clients, 2 failed (1 could not but fail)" in (
        capture.get()
    )
    assert "retries by the gateways: 3" in capture.get()
    assert told["faults"][0]["kind"] == "engine core killed"
    assert told["faults"][0]["at_s"] == 20
    assert [each["lost_with"] for each in told["failures"]] == ["engine core killed", None]
    assert told["reached"] is False


# --- counters -------------------------------------------------------------------------------

EXPOSITION = """\
# HELP vllm:request_success_total Count of successfully processed requests.
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 2.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 5.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 4.0
vllm:request_success_created{engine="0",finished_reason="stop",model_name="m"} 1.7e9
moe_serving_retries_total 3.0
"""


def test_aborted_requests_are_no_answers_of_an_engine() -> None:
    assert finished_requests(EXPOSITION) == 7


def test_a_counter_that_is_not_there_is_zero() -> None:
    assert total(EXPOSITION, "moe_serving_retries_total") == 3
    assert total(EXPOSITION, "moe_serving_leases") == 0


def test_a_folder_without_a_stack_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoStackError, match=f"{tmp_path} holds no running stack"):
        StackProcesses(tmp_path)


def test_processes_are_known_by_mark_title_and_rays_log(tmp_path: Path) -> None:
    home, logs = tmp_path / "home", tmp_path / "temp" / "session_latest" / "logs"
    home.mkdir()
    logs.mkdir(parents=True)
    (home / "run.json").write_text(json.dumps({"temp": str(tmp_path / "temp")}))
    (home / "engine.key").write_text("key\n")
    title = "ray::ServeReplica:engine-m-plain-1:VllmEngine:a"
    program = f"exec -a '{title}' sleep 60"
    process = subprocess.Popen(
        ["bash", "-c", program], env={MARK: str(home), "PATH": "/usr/bin:/bin"}
    )
    log = '{"actor_name": "SERVE_REPLICA::engine-m-plain-1#VllmEngine:a#etxe6pqn"}'
    (logs / f"worker-1-2-{process.pid}.err").write_text(log)
    stack = StackProcesses(home)
    try:
        deadline = time.monotonic() + 30
        while not stack.parts().engines:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert stack.parts() == Parts({"engine-m-plain-1": 1}, gateways=0)
        assert [each.pid for each in stack.all()] == [process.pid]
        assert stack._name(process.pid) == "etxe6pqn"
        assert stack.engines() == [], "it does not answer"
    finally:
        process.kill()
        process.wait()


# --- faults, on processes of the tests' own ------------------------------------------------


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[psutil.Process]:
    """A process that bears the mark of a stack in tmp_path, and a child that is its core."""
    program = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', 'EngineCore'])\n"
        "time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], env={MARK: str(tmp_path), "PATH": "/usr/bin"}
    )
    yield psutil.Process(process.pid)
    for child in psutil.Process(process.pid).children() if process.poll() is None else []:
        child.kill()
    process.kill()
    process.wait()


class Stack(StackProcesses):
    """A stack of processes of the tests' own."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas

    def engines(self) -> list[Replica]:
        return [each for each in self.replicas if not ended(each.process)]

    def gateways(self) -> list[psutil.Process]:
        return []

    def controllers(self) -> list[psutil.Process]:
        return [psutil.Process()]


@pytest.fixture
def replica(victim: psutil.Process) -> Replica:
    found = Replica(victim, "engine-m-plain-1", "r1", "http://127.0.0.1:1")
    deadline = time.monotonic() + 30
    while found.core is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


async def until(condition: Callable[[], bool]) -> None:
    """A process that was sent a signal may take a moment to be gone."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_killed_core_is_the_replicas_fault_and_the_replica_has_to_go(
    replica: Replica,
) -> None:
    core = replica.core
    assert core is not None
    done = await inject(Planned(FaultKind.CORE_KILLED, 0, 0.0), Stack([replica]), ["m"])

    await until(lambda: ended(core))
    assert not ended(replica.process)
    assert (done.replica, done.victim) == ("r1", "engine-m-plain-1 r1")
    assert done.began <= done.done
    assert done.leaving == (replica.process,)


async def test_an_engine_without_load_is_left_alone(replica: Replica) -> None:
    with pytest.raises(ValueError, match="nothing there for: engine core killed"):
        await inject(Planned(FaultKind.CORE_KILLED, 0, 0.0), Stack([replica]), ["b"])
    assert not ended(replica.process)


async def test_a_killed_replica_is_gone(replica: Replica) -> None:
    core = replica.core
    assert core is not None
    await inject(Planned(FaultKind.REPLICA_KILLED, 0, 0.0), Stack([replica]), ["m"])

    await until(lambda: ended(replica.process))
    core.kill()


async def test_a_slow_core_goes_on_after_its_halt(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos_faults, "SLOW_FOR_S", 0.3)
    core = replica.core
    assert core is not None
    halting = asyncio.create_task(
        inject(Planned(FaultKind.CORE_SLOW, 0, 0.0), Stack([replica]), ["m"])
    )
    while core.status() != psutil.STATUS_STOPPED:
        assert not halting.done()
        await asyncio.sleep(0.01)
    done = await halting

    assert core.status() != psutil.STATUS_STOPPED
    assert done.leaving == ()


async def test_a_halted_core_goes_on_where_the_run_is_broken_off(replica: Replica) -> None:
    core = replica.core
    assert core is not None
    halting = asyncio.create_task(
        inject(Planned(FaultKind.CORE_HUNG, 0, 0.0), Stack([replica]), ["m"])
    )
    while core.status() != psutil.STATUS_STOPPED:
        await asyncio.sleep(0.01)
    halting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await halting

    assert core.status() != psutil.STATUS_STOPPED


async def test_a_stack_is_whole_when_what_was_to_go_has_gone(
    replica: Replica, fake: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack, parts = Stack([replica]), Parts({"engine-m-plain-1": 1}, gateways=0)
    assert replica.core is not None
    await wait_until_whole(stack, parts, "", [])

    monkeypatch.setattr(chaos_faults, "RECOVERED_WITHIN_S", 0.1)
    with pytest.raises(chaos_faults.UnrecoveredError, match=r"process .* is still there"):
        await wait_until_whole(stack, parts, "", [], leaving=[replica.process])
    with pytest.raises(chaos_faults.UnrecoveredError, match="1 of 2 replicas of engine-m-plain-1"):
        await wait_until_whole(stack, Parts({"engine-m-plain-1": 2}, 0), "", [])
    with pytest.raises(chaos_faults.UnrecoveredError, match=r"an answer of m \(HTTP 404\)"):
        await wait_until_whole(stack, parts, fake(), ["m"])


# --- the load -------------------------------------------------------------------------------


def test_the_same_seed_asks_the_same_and_asks_of_every_kind() -> None:
    def asked(seed: int) -> list[Asked]:
        load = Load("http://x", ["a", "b"], seed, "run")
        return [load.next() for _ in range(200)]

    first = asked(1)
    assert first == asked(1) != asked(2)
    assert len({each.id for each in first}) == 200
    assert Counter(each.model for each in first) == {"a": 100, "b": 100}
    for kind in (
        lambda each: each.streamed,
        lambda each: "messages" in each.body,
        lambda each: each.body["max_tokens"] >= 100,
        lambda each: each.leaves_after_s is not None,
        lambda each: each.keeps_connection,
    ):
        assert {kind(each) for each in first} == {True, False}


@asynccontextmanager
async def server(answer: Callable[[web.Request], object]) -> AsyncIterator[str]:
    """A server whose every POST `answer` answers."""
    app = web.Application()
    app.router.add_post("/{path:.*}", answer)  # type: ignore[arg-type]
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def streaming(*events: str, id: str = ASKED.id, hang_up: bool = False) -> Callable[..., object]:
    async def answer(request: web.Request) -> web.StreamResponse:
        headers = {"content-type": "text/event-stream", "x-moe-serving-replica": "r1"}
        reply = web.StreamResponse(headers=headers)
        await reply.prepare(request)
        for event in events:
            await reply.write(f"data: {event}\n\n".replace("ID", id).encode())
        if hang_up:
            assert request.transport is not None
            request.transport.close()
        return reply

    return answer


async def asked_of(answer: Callable[..., object], asked: Asked = ASKED) -> Request:
    async with server(answer) as url, aiohttp.ClientSession() as session:
        return await send(session, url, asked)


TOKEN = '{"id": "cmpl-ID", "choices": [{"text": "x"}]}'


async def test_a_whole_stream_is_an_answer_of_its_replica() -> None:
    request = await asked_of(streaming(TOKEN, TOKEN, "[DONE]"))

    assert (request.outcome, request.replica, request.foreign) == ("answered", "r1", False)
    assert request.head_at is not None and request.sent_at <= request.head_at <= request.ended_at


@pytest.mark.parametrize(
    ("events", "hang_up", "cause"),
    [
        ((TOKEN, '{"error": {"code": "engine_died"}}'), False, "stream ended by engine_died"),
        ((TOKEN,), False, "stream without its end mark"),
        ((TOKEN,), True, "connection broken in a reply"),
        ((TOKEN, "{"), False, "unreadable reply"),
    ],
)
async def test_a_stream_that_is_cut_says_how(
    events: tuple[str, ...], hang_up: bool, cause: str
) -> None:
    request = await asked_of(streaming(*events, hang_up=hang_up))

    assert (request.outcome, request.cause) == ("failed", cause)
    assert request.replica == "r1"


async def test_an_answer_to_another_request_is_noticed() -> None:
    assert (await asked_of(streaming(TOKEN, "[DONE]", id="chaos-a-2"))).foreign


async def test_a_refusal_has_status_and_code() -> None:
    async def refuse(request: web.Request) -> web.Response:
        body = {"error": {"message": "not ready", "code": "engine_unavailable"}}
        return web.json_response(body, status=503)

    request = await asked_of(refuse, WHOLE)
    assert (request.outcome, request.cause) == ("failed", "HTTP 503 engine_unavailable")
    assert (request.text, request.head_at) == ("not ready", None)


async def test_a_whole_reply_is_known_by_its_id() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"id": f"cmpl-{request.headers['x-request-id']}"})

    request = await asked_of(answer, WHOLE)
    assert (request.outcome, request.foreign) == ("answered", False)


async def test_a_client_that_leaves_is_no_failure() -> None:
    async def wait(request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    request = await asked_of(wait, replace(WHOLE, leaves_after_s=0.1))
    assert request.outcome == "left"


async def test_a_server_that_is_not_there_is_no_connection() -> None:
    async with aiohttp.ClientSession() as session:
        request = await send(session, "http://127.0.0.1:1", ASKED)
    assert (request.outcome, request.cause) == ("failed", "no connection")


async def test_a_connection_that_breaks_before_the_reply_is_told_apart() -> None:
    async def hang_up(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    assert (await asked_of(hang_up)).cause == "connection broken"


async def test_the_load_ends_with_every_request_accounted_for() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"error": {"code": "no"}}, status=503)

    async with server(answer) as url:
        load = Load(url, ["a"], seed=1, run="r")
        running = asyncio.create_task(load.run(clients=3))
        while len(load.requests) < 6:
            await asyncio.sleep(0.01)
        load.stop()
        await running
    assert len(load.requests) >= 6
    assert {each.cause for each in load.requests if each.outcome == "failed"} == {"HTTP 503 no"}


# --- a run ----------------------------------------------------------------------------------


class Counting(Stack):
    """The same, whose engine says that it finished `times` requests for each that came."""

    def __init__(self, replicas: list[Replica], times: int) -> None:
        super().__init__(replicas)
        self.times, self.came, self.retried = times, 0, 0

    def parts(self) -> Parts:
        return Parts({"engine-m-plain-1": 1}, gateways=0)

    def gateway_metrics(self) -> dict[int, str]:
        self.retried += 1
        return {1: f"moe_serving_retries_total {self.retried}.0", 2: "moe_serving_leases 0.0"}

    def engine_metrics(self, replica: Replica) -> str:
        finished = 5 + self.times * self.came
        return f'vllm:request_success_total{{finished_reason="length"}} {finished}.0'

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/tokenize":
            return web.json_response({})
        self.came += 1
        headers = {"x-moe-serving-replica": "r1"}
        id = f"cmpl-{request.headers['x-request-id']}"
        if not (await request.json())["stream"]:
            return web.json_response({"id": id}, headers=headers)
        reply = web.StreamResponse(headers=headers)
        await reply.prepare(request)
        await reply.write(f'data: {{"id": "{id}"}}\n\ndata: [DONE]\n\n'.encode())
        return reply


@pytest.mark.parametrize("times", [1, 2])
async def test_a_run_counts_what_engines_and_clients_say(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    monkeypatch.setattr(chaos_faults, "SLOW_FOR_S", 0.2)
    monkeypatch.setattr(chaos_run, "QUIET_END_S", 0.1)
    slow = Planned(FaultKind.CORE_SLOW, 0.1, 0.0)
    nothing = Planned(FaultKind.PROXY_KILLED, 0.0, 0.0)
    monkeypatch.setattr(chaos_run, "schedule", lambda seed: iter([slow, nothing]))
    monkeypatch.setattr(Stack, "proxies", lambda self: [], raising=False)
    stack, told = Counting([replica], times), list[str]()
    plan = Plan(seed=1, seconds=60, faults=2, clients=2)
    async with server(stack.answer) as url:
        found = await chaos_run._run(url, stack, ["m"], plan, told.append)

    assert [each.fault.kind for each in found.suffered] == [FaultKind.CORE_SLOW]
    assert found.suffered[0].whole_after_s is not None
    assert found.skipped == ["nothing there for: HAProxy killed"]
    assert "engine core slow: engine-m-plain-1 r1" in told[0] and "whole again" in told[1]
    assert found.client_answers == sum(each.outcome == "answered" for each in found.requests) > 0
    assert found.engine_answers == times * stack.came
    assert (found.duplicates > 0) == (times == 2)
    assert found.retries > 0 and found.leases == 0
    assert reached(found) == (times == 1)


# --- the program ----------------------------------------------------------------------------


def test_the_programs_options_have_their_defaults(module: Callable[[str], ModuleType]) -> None:
    given = module("chaos").options(["--minutes", "1.5", "--faults", "2"])

    assert (given.minutes, given.faults, given.seed, given.stack) == (1.5, 2, 0, "chaos-demo")


@pytest.mark.parametrize("text", ["--minutes=0.1", "--minutes=x", "--faults=0", "--clients=-1"])
def test_options_without_sense_are_refused(text: str, module: Callable[[str], ModuleType]) -> None:
    with pytest.raises(SystemExit):
        module("chaos").options([text])
