"""Carrying a study out, and taking one up again where it ended.

Owns a run's folder (one study in it, one program at a time), the blocks in their order, the
events, and the progress that is shown. Leaves the order to `schedule`, an arm's
requests to `closed_loop`, engines to `stage`, and what the figures mean to the report.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import inspect
import json
import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from serving.signals import handled
from serving.stack import history
from serving.stack.spec import StackSpec
from serving.studies import environment, stage
from serving.studies.client import Client
from serving.studies.closed_loop import BACK_WITHIN_S, ArmLoad, Material
from serving.studies.overhead.servers import ServerError
from serving.studies.prompts import Prompt, load_prompts, short
from serving.studies.records import (
    REQUESTS,
    STUDY,
    Arm,
    Event,
    EventKind,
    RequestRecord,
    StudyRecord,
    append_request,
    read_requests,
    read_study,
    write_study,
)
from serving.studies.schedule import Block, Cell, Question, plan, planned_requests, questions_of
from serving.studies.spec import StudySpec

LOCK = "lock"
MAX_EVENT_CHARS = 1000
# What may differ when a run is taken up again: when it stops, and how it is called.
_FREE_FIELDS = frozenset({"name", "question", "stop"})


class StudyError(RuntimeError):
    """The study cannot be carried out; the text says why and the cure."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What there is after one call of `run_study`."""

    recorded: int
    """Requests in the folder."""
    planned: int
    """Requests of the whole study."""
    failed: int
    """Of those recorded."""
    interrupted: bool = False


def run_study(
    spec: StudySpec,
    folder: Path,
    console: Console,
    *,
    url: str | None = None,
    back_within_s: float = BACK_WITHIN_S,
) -> Outcome:
    """Send every request of the study that `folder` does not hold yet.

    `url` is the API of a stack that serves the arms; without it, the stack that runs here is
    used where it is the same, and else one is started and ended. An engine that goes away is
    waited for `back_within_s` seconds and then left out; Ctrl-C keeps what is done. Raises
    StudyError, StageError, ServerError, ConfigError, PromptsError and RecordsError.
    """
    stack = stage.study_stack(spec)
    prompts = load_prompts(spec.prompts, spec.categories)
    context = _context(spec)
    _check_keys(spec)
    with _held(folder), handled((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler):
        running = stage.running_stack(stack) if stack and url is None else None
        if running is not None:
            url = running[0]
        study = _taken_up(folder, spec, stack, together=url is not None)
        material = Material(spec, {each.id: each for each in prompts}, int(study.id, 16), context)
        sitting = _Sitting(folder, study, stack, material, console, back_within_s)
        return sitting.carry_out(url)


class _Sitting:
    """One call of `run_study` on one folder."""

    def __init__(
        self,
        folder: Path,
        study: StudyRecord,
        stack: StackSpec | None,
        material: Material,
        console: Console,
        back_within_s: float,
    ) -> None:
        self._folder = folder
        self._study = study
        self._stack = stack
        self._material = material
        self._spec = material.spec
        self._console = console
        self._back_within_s = back_within_s
        self._ids = _by_category(list(material.prompts.values()))
        self._blocks = plan(self._spec, tuple(self._ids), study.spec["blocks"])
        self._planned = planned_requests(self._blocks, self._ids, self._spec)
        before = tuple(read_requests(folder))
        self._done = {(each.cell, each.prompt) for each in before}
        self._failed = sum(not each.ok for each in before)
        self._ends = time.monotonic() + 60 * self._spec.stop.max_minutes
        self._out_of_time = False
        self._shown_round = -1
        self._progress = _bar(console)
        total, left = (
            sum(self._tokens(block, only_left=only_left) for block in self._blocks)
            for only_left in (False, True)
        )
        self._task = self._progress.add_task(
            self._spec.name,
            total=total,
            completed=total - left,
            requests=len(self._done),
            planned=self._planned,
        )

    def carry_out(self, url: str | None) -> Outcome:
        """Every block that has something left; `url` where the stack runs already."""
        interrupted, failures, done_before = False, [], len(self._done)
        if done_before:
            self._note("resumed", f"taken up again after {done_before} of {self._planned} requests")
        try:
            with self._progress:
                for block in self._blocks:
                    if self._out_of_time or not self._tokens(block, only_left=True):
                        continue
                    try:
                        self._serve_and_measure(block, url)
                    except ServerError as error:
                        failures.append(error)
                        text = f"{', '.join(block.arms)} did not start: {_one_line(error)}"
                        self._note("engine_not_started", text)
        except KeyboardInterrupt:
            interrupted = True
            self._note("interrupted", "interrupted")
        if failures and len(self._done) == done_before:
            raise failures[0]
        if len(self._done) >= self._planned:
            self._write(ended_at=time.time())
        return Outcome(len(self._done), self._planned, self._failed, interrupted)

    def _serve_and_measure(self, block: Block, url: str | None) -> None:
        variants = [arm for arm in block.arms if arm in self._spec.arms.of_stack]
        serving: AbstractContextManager[str] = nullcontext(url or "")
        if url is None and variants and self._stack is not None:
            log = self._folder / stage.STACK_LOG
            serving = stage.started(self._stack, variants, log, self._print)
        with serving as address:
            arms = stage.arms_of(self._spec, self._stack, address)
            if address:
                self._write(arms=arms)
            # `asyncio.run` turns Ctrl-C into a cancellation and then into KeyboardInterrupt.
            asyncio.run(self._measure(block, {arm.name: arm for arm in arms}, own=url is None))

    async def _measure(self, block: Block, arms: Mapping[str, Arm], *, own: bool) -> None:
        async with AsyncExitStack() as opened:
            loads = {}
            for name in block.arms:
                client = Client(arms[name].url, api_key=self._key(name, own=own))
                await opened.enter_async_context(client)
                loads[name] = ArmLoad(
                    arms[name],
                    client,
                    self._material,
                    self._save,
                    self._note,
                    back_within_s=self._back_within_s,
                )
                if any(self._left(cell) for cell in block.cells if cell.arm == name):
                    self._progress.update(self._task, description=f"warming {name} up")
                    await loads[name].warm_up()
            for cell in block.cells:
                if not self._may_begin():
                    return
                await self._one_cell(cell, loads[cell.arm])

    async def _one_cell(self, cell: Cell, load: ArmLoad) -> None:
        questions = self._left(cell)
        if not questions or load.given_up:
            return
        self._show(cell)
        before = environment.energy_counters()
        await load.run(cell, questions)
        joules = environment.energy_between(before, environment.energy_counters())
        if joules is not None:
            spent = self._study.energy_j or {}
            total = spent.get(cell.arm, 0) + joules
            self._write(energy_j={**spent, cell.arm: total})

    def _show(self, cell: Cell) -> None:
        self._progress.update(self._task, description=f"round {cell.round + 1}, {cell.arm}")
        # Without a terminal there is no bar; a line for each round tells that it goes on.
        if not self._console.is_terminal and cell.round != self._shown_round:
            self._print(
                f"round {cell.round + 1}: {len(self._done)} of {self._planned} requests done"
            )
        self._shown_round = cell.round

    def _may_begin(self) -> bool:
        if time.monotonic() < self._ends:
            return True
        if not self._out_of_time:
            self._out_of_time = True
            self._note("out_of_time", f"stopped after {self._spec.stop.max_minutes:g} minutes")
        return False

    def _left(self, cell: Cell) -> list[Question]:
        """What the cell asks and the folder does not hold."""
        asked = questions_of(cell, self._ids[cell.point.category], self._spec)
        return [each for each in asked if (cell.id, each.key) not in self._done]

    def _tokens(self, block: Block, *, only_left: bool) -> int:
        """Tokens that a block's requests may give: the measure of how far a run is."""
        total = 0
        for cell in block.cells:
            asked = questions_of(cell, self._ids[cell.point.category], self._spec)
            count = len(self._left(cell)) if only_left else len(asked)
            total += count * cell.point.max_tokens
        return total

    def _save(self, record: RequestRecord) -> None:
        append_request(self._folder, record)
        self._done.add((record.cell, record.prompt))
        self._failed += not record.ok
        self._progress.update(self._task, advance=record.max_tokens, requests=len(self._done))

    def _note(self, kind: EventKind, text: str) -> None:
        event = Event(at=time.time(), kind=kind, text=text)
        self._write(events=(*self._study.events, event))
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def _write(self, **changes: Any) -> None:
        self._study = self._study.model_copy(update=changes)
        write_study(self._folder, self._study)

    def _key(self, arm: str, *, own: bool) -> str | None:
        """The arm's API key; a stack of the study's own needs none."""
        endpoint = self._spec.arms.endpoints.get(arm)
        if endpoint is None:
            return None if own else os.environ.get("OPENAI_API_KEY")
        return endpoint.api_key_env and os.environ.get(endpoint.api_key_env)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[requests]} of {task.fields[planned]} requests"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        console=console,
        # Cells differ in length; a short look back would make the time left jump.
        speed_estimate_period=900,
    )


def _taken_up(
    folder: Path, spec: StudySpec, stack: StackSpec | None, *, together: bool
) -> StudyRecord:
    """The study that `folder` holds, or a new one; raises StudyError where it is another."""
    asked = spec.model_dump(mode="json", by_alias=True)
    served = json.loads(history.to_json(stack)) if stack else None
    if (folder / STUDY).exists():
        study = read_study(folder)
        if spec.blocks == "auto":
            asked["blocks"] = study.spec.get("blocks")
        _check_same(folder, study, asked, served)
        _drop_cut_line(folder)
        return study.model_copy(update={"spec": asked, "ended_at": None})
    if (folder / REQUESTS).exists():
        raise StudyError(f"{folder} holds {REQUESTS} but no {STUDY}; give another folder")
    asked["blocks"] = "all-at-once" if together else stage.fitting_blocks(spec, stack)
    gpu = spec.gpu or (stack.models[0].gpu if stack else "cpu")
    study = StudyRecord(
        id=secrets.token_hex(6),
        name=spec.name,
        question=spec.question,
        arms=stage.arms_of(spec, stack, ""),
        plain=spec.plain,
        gpu=gpu,
        environment=environment.machine_facts(),
        commit=environment.commit(),
        stack=served,
        spec=asked,
        started_at=time.time(),
    )
    write_study(folder, study)
    return study


def _check_same(
    folder: Path, study: StudyRecord, asked: Mapping[str, Any], served: Mapping[str, Any] | None
) -> None:
    fields = (study.spec.keys() | asked.keys()) - _FREE_FIELDS
    other = sorted(name for name in fields if study.spec.get(name) != asked.get(name))
    if other:
        changes = "; ".join(
            f"{name} was {short(study.spec.get(name))}, now {short(asked.get(name))}"
            for name in other
        )
        raise StudyError(
            f"{folder} holds a run of another study ({study.name}): {changes}; "
            "give another folder, or the study file it was begun with"
        )
    if study.stack != served:
        raise StudyError(
            f"{folder} was begun on another stack: {study.spec.get('stack')} has changed since; "
            "give another folder, or undo the change"
        )


def _drop_cut_line(folder: Path) -> None:
    """Drop a last line that a killed program left unfinished; its request is asked again."""
    file = folder / REQUESTS
    if file.exists() and not (content := file.read_bytes()).endswith(b"\n"):
        file.write_bytes(content[: content.rfind(b"\n") + 1])


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold the folder against a second program that would write into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise StudyError(f"{folder} cannot be written ({error.strerror}); give another") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StudyError(f"another study run is writing into {folder}") from None
        yield


def _by_category(prompts: Sequence[Prompt]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for prompt in prompts:
        found.setdefault(prompt.category, []).append(prompt.id)
    return found


def _check_keys(spec: StudySpec) -> None:
    for name, endpoint in spec.arms.endpoints.items():
        variable = endpoint.api_key_env
        if variable is not None and not os.environ.get(variable):
            raise StudyError(
                f"arms.endpoints.{name}.api_key_env: {variable} is not set; export it, "
                "or remove the line where the server needs no key"
            )


def _context(spec: StudySpec) -> str:
    """The text that context is cut from; raises StudyError where it is too short."""
    if spec.context is None:
        return ""
    file = spec.context.text
    try:
        text = inspect.getsource(argparse) if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StudyError(f"context.text: {file} cannot be read ({error})") from None
    needed = round(max(spec.context.tokens) * spec.context.characters_per_token)
    if len(text) < 2 * needed:
        raise StudyError(
            f"context.text: has {len(text)} characters, but the deepest context takes {needed}, "
            "and prompts should not share it; give one of at least twice that"
        )
    return text


def _one_line(error: Exception) -> str:
    return " / ".join(str(error).split("\n"))[-MAX_EVENT_CHARS:]
