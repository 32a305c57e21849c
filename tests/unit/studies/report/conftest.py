"""Runs made of formulas, to draw reports from. Nothing here was measured on any machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from serving.studies.records import (
    Arm,
    Drafting,
    Event,
    RequestRecord,
    Run,
    StudyRecord,
    append_request,
    write_study,
)

STARTED = 1_800_000_000.0
ACCEPTANCE = {"code": 0.86, "chat": 0.62, "reasoning": 0.71, "<b>json</b>": 0.8}


def made_up(
    *,
    arms: tuple[int, ...] = (0, 1, 2, 3, 4),
    streams: tuple[int, ...] = (1, 4, 16),
    max_tokens: tuple[int, ...] = (128,),
    prompts: int = 6,
    rounds: int = 2,
    base_s: float = 0.02,
    gpu: str = "rtx3090",
    id: str = "made-up-1",
) -> Run:
    """A run whose MTP gains at few streams and loses at many, with a cut stream per arm."""
    draw = random.Random(7)
    names = ["plain" if n == 0 else f"mtp-{n}" for n in arms]
    cells = [
        (number, name, n, category, count, tokens)
        for number in range(rounds + 1)
        for name, n in zip(names, arms, strict=True)
        if number < rounds or n == 0
        for tokens in max_tokens
        for count in streams
        for category in ACCEPTANCE
    ]
    requests: list[RequestRecord] = []
    clock = STARTED
    for cell in cells:
        count = max(prompts, cell[4])
        began = clock
        for turn in range(count):
            if turn and turn % cell[4] == 0:
                began = clock
            found = answer(*cell, turn % prompts, base_s, began, draw)
            # Plain's last pass is its first round again.
            if found.round == rounds:
                found = found.model_copy(update={"round": 0, "again": True})
            requests.append(found)
            clock = max(clock, began + (found.duration_s or 0))
    for n, name in zip(arms, names, strict=True):
        requests.append(cut(name, n, streams[0], max_tokens[0], clock))
    return Run(study(names, arms, streams, max_tokens, rounds, gpu, id), tuple(requests))


def answer(
    number: int,
    arm: str,
    n: int,
    category: str,
    streams: int,
    max_tokens: int,
    prompt: int,
    base_s: float,
    sent_at: float,
    draw: random.Random,
) -> RequestRecord:
    rate = ACCEPTANCE[category] + 0.05 * draw.uniform(-1, 1)
    per_step = sum(rate**place for place in range(n + 1))
    step_s = base_s * (1 + 0.03 * streams) * (1 + n * (0.1 + 0.03 * streams))
    tpot = step_s / per_step * (1 + 0.04 * draw.uniform(-1, 1))
    ttft = (0.05 + 0.004 * streams + 0.012 * n) * (1 + 0.1 * draw.uniform(-1, 1))
    drafts = round((max_tokens - 1) / per_step)
    places = tuple(round(drafts * rate**place) for place in range(1, n + 1))
    drafting = Drafting(
        drafts=drafts,
        drafted=drafts * n,
        accepted=sum(places),
        accepted_per_position=places,
    )
    return RequestRecord(
        cell=f"r{number}-{arm}-{category}-s{streams}-t{max_tokens}",
        round=number,
        arm=arm,
        draft_tokens=n,
        streams=streams,
        category=category,
        prompt=f"{category}-{prompt}",
        temperature=0,
        max_tokens=max_tokens,
        sent_at=sent_at,
        outcome="ok",
        ttft_s=ttft,
        duration_s=ttft + (max_tokens - 1) * tpot,
        prompt_tokens=90 + prompt,
        completion_tokens=max_tokens,
        chunks=drafts,
        finish_reason="length",
        drafting=drafting if n else None,
        distinct_4grams=0.93,
    )


def cut(arm: str, n: int, streams: int, max_tokens: int, sent_at: float) -> RequestRecord:
    return RequestRecord(
        cell=f"r0-{arm}-chat-s{streams}-t{max_tokens}",
        round=0,
        arm=arm,
        draft_tokens=n,
        streams=streams,
        category="chat",
        prompt="chat-0",
        temperature=0,
        max_tokens=max_tokens,
        sent_at=sent_at,
        outcome="cut",
        error="the stream ended before its end mark: the server broke it off",
        ttft_s=0.06,
        duration_s=0.4,
    )


def study(
    names: list[str],
    arms: tuple[int, ...],
    streams: tuple[int, ...],
    max_tokens: tuple[int, ...],
    rounds: int,
    gpu: str,
    id: str,
) -> StudyRecord:
    return StudyRecord(
        schema=1,
        id=id,
        name="n-sweep",
        question="Made up for tests: how many draft tokens pay, by kind of prompt?",
        arms=tuple(
            Arm(name=name, url="http://127.0.0.1:8000/v1", model=f"tiny@{name}", draft_tokens=n)
            for name, n in zip(names, arms, strict=True)
        ),
        plain="plain",
        gpu=gpu,
        environment={
            "cpu": "AMD EPYC 7763, 2 cores",
            "gpu": "NVIDIA GeForce RTX 3090, 24 GiB",
            "driver": "570.133.07",
            "python": "3.11.7",
            "vllm": "0.32.0",
            "kernel": "Linux-6.1.0-a-long-name-with-no-place-to-break_x86_64-with-glibc2.36",
        },
        commit="6cd48a4f0c1e2d3b4a59687f6e5d4c3b2a190807",
        stack={"schema": 1, "models": [{"id": "tiny", "variants": names}]},
        spec={
            "schema": 1,
            "name": "n-sweep",
            "arms": {"draft_tokens": list(arms)},
            "streams": list(streams),
            "max_tokens": list(max_tokens),
            "repetitions": rounds,
            "blocks": "all-at-once",
            "temperature": 0.0,
            "seed": 1,
        },
        started_at=STARTED,
        ended_at=STARTED + 5400,
        events=(
            Event(
                at=STARTED + 60,
                kind="engine_lost",
                text="mtp-4's engine ended with code 1 in round 1",
            ),
            Event(at=STARTED + 120, kind="interrupted", text="interrupted"),
        ),
    )


def write(run: Run, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_study(folder, run.study)
    for each in run.requests:
        append_request(folder, each)
    return folder


@pytest.fixture
def make_run() -> Callable[..., Run]:
    """Makes a run: `make_run(arms=(0, 1), streams=(1, 4))`."""
    return made_up


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder; its report is written by those who need one."""
    return write(made_up(), tmp_path_factory.mktemp("made-up"))


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same study on another GPU, with an arm less."""
    run = made_up(arms=(0, 1, 2, 3), base_s=0.012, gpu="rtx4090", id="made-up-2")
    return write(run, tmp_path_factory.mktemp("other"))
