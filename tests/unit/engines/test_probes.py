"""Probes, against servers that misbehave on purpose."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from serving.engines import probes as room
from serving.engines.drafting import Drafting
from serving.engines.probe_settings import VARIABLE, Probes

Answer = Callable[[dict[str, Any]], str]
CALL = [
    {"tool_calls": [{"index": 0, "function": {"name": "get_weather", "arguments": '{"city":'}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": ' "Paris"}'}}]},
]


class Server:
    """An OpenAI API whose answers and drafts the test decides."""

    def __init__(
        self, answer: Answer = lambda body: "text", rates: tuple[float, ...] = (0.7, 0.5)
    ) -> None:
        self.answer = answer
        self.rates = rates
        self.deltas: list[dict[str, Any]] = CALL
        self.asked: list[dict[str, Any]] = []

    def drafting(self) -> Drafting:
        """Twenty drafts for each completion."""
        drafts = 20 * len(self.asked) if self.rates else 0
        places = tuple(round(rate * drafts) for rate in self.rates)
        return Drafting(drafts, drafts * len(places), sum(places), places)

    async def complete(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        return web.json_response({"choices": [{"text": self.answer(self.asked[-1])}]})

    async def chat(self, request: web.Request) -> web.Response:
        events = [
            f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in self.deltas
        ]
        return web.Response(text="".join([*events, "data: [DONE]\n\n"]))


@asynccontextmanager
async def listening(server: Server) -> AsyncIterator[room.Target]:
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_post("/v1/chat/completions", server.chat)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        yield room.Target(f"http://127.0.0.1:{port}", "m", {}, max_model_len=8192)
    finally:
        await runner.cleanup()


async def verdict(server: Server, probes: Probes) -> str | None:
    async with listening(server) as target:
        return await room.run(probes, target, server.drafting)


async def test_an_engine_that_drafts_well_passes_after_enough_drafts() -> None:
    server = Server()
    assert await verdict(server, Probes(acceptance=True, drafts=200)) is None
    assert len(server.asked) == 10
    assert len({body["prompt"] for body in server.asked}) == len(room.PROMPTS)


@pytest.mark.parametrize(
    ("rates", "reason"),
    [
        ((0.0, 0.0), "acceptance probe: accepted 0.000 of"),
        ((0.08, 0.02), "below 0.1 (probes.min_acceptance)"),
        ((0.99, 0.98), "the text goes in circles"),
        ((), "nothing was drafted"),
    ],
)
async def test_a_head_that_does_not_work_fails(rates: tuple[float, ...], reason: str) -> None:
    found = await verdict(Server(rates=rates), Probes(acceptance=True))
    assert reason in str(found)


async def test_acceptance_is_probed_after_a_long_context_too() -> None:
    server = Server()
    assert await verdict(server, Probes(long_context_tokens=1000, drafts=20)) is None
    assert len(server.asked[0]["prompt"]) > 3000


async def test_the_same_prompt_with_another_answer_from_cache_fails() -> None:
    seen: list[str] = []

    def poisoned(body: dict[str, Any]) -> str:
        seen.append(body["prompt"])
        return f"answer {seen.count(body['prompt'])}"

    found = await verdict(Server(poisoned), Probes(prefix=True))
    assert "another greedy answer once its prefix is cached" in str(found)


async def test_an_empty_answer_from_cache_fails_at_once() -> None:
    seen: list[str] = []

    def empty(body: dict[str, Any]) -> str:
        seen.append(body["prompt"])
        return "" if seen.count(body["prompt"]) > 1 else "text"

    assert "empty one from cache" in str(await verdict(Server(empty), Probes(prefix=True)))


async def test_one_difference_in_two_tries_is_rounding() -> None:
    answers = iter(["a", "b", "another", "c", "d", "c"])
    server = Server(lambda body: next(answers))
    assert await verdict(server, Probes(prefix=True)) is None
    assert len(server.asked) == 6


async def test_prompts_of_the_prefix_probe_share_no_beginning() -> None:
    server = Server()
    assert await verdict(server, Probes(prefix=True)) is None
    one, other, again = (body["prompt"] for body in server.asked)
    assert one == again != other
    assert one[:40] != other[:40]


async def test_a_parsed_tool_call_passes_and_so_does_none() -> None:
    server = Server()
    assert await verdict(server, Probes(tools=True)) is None
    server.deltas = [{"content": "It is sunny."}]
    assert await verdict(server, Probes(tools=True)) is None


async def test_markup_left_in_the_text_fails() -> None:
    server = Server()
    server.deltas = [{"content": "<tool_"}, {"content": "call><function=get_weather>"}]
    assert "'<tool_call>' in the text" in str(await verdict(server, Probes(tools=True)))


async def test_arguments_that_are_no_json_fail() -> None:
    server = Server()
    server.deltas = CALL[:1]
    assert "arguments that are no JSON" in str(await verdict(server, Probes(tools=True)))


async def test_a_server_that_refuses_fails_with_its_own_words() -> None:
    async with listening(Server()) as target:
        other = room.Target(f"{target.url}/elsewhere", "m", {}, 8192)
        found = await room.run(Probes(acceptance=True), other, Drafting)
    assert "a completion failed with HTTP 404" in str(found)


async def test_probes_end_in_time() -> None:
    server = Server()
    found = await verdict(server, Probes(acceptance=True, within_s=0.0))
    assert found == "the probes took longer than 0 s (probes.within_s)"


async def test_a_server_that_is_gone_is_a_failure_and_no_crash() -> None:
    async with listening(Server()) as target:
        pass
    found = await room.run(Probes(acceptance=True), target, Drafting)
    assert "could not be read" in str(found)


def test_settings_travel_in_the_environment() -> None:
    probes = Probes(acceptance=True, drafts=50, on_collapse="drain")
    assert Probes.from_environment(probes.to_environment()) == probes
    assert Probes().to_environment() == {}
    assert Probes.from_environment({}) == Probes()
    assert VARIABLE in probes.to_environment()
