"""One arm of a study under load: its requests, a fixed number of them in flight.

Owns what a request says, the closed loop (each stream sends its next request when the last
one ended), warming up, and what happens when an engine goes away. Leaves which requests to
`schedule`, when to `run`, and a request's record to `recording`.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from serving.studies.client import ApiFailureError, Client, Request, Result, prompt_request
from serving.studies.prompts import Prompt, new_salt, salted
from serving.studies.recording import Sent, as_record
from serving.studies.records import Arm, EventKind, RequestRecord
from serving.studies.schedule import Cell, Question, draw
from serving.studies.spec import StudySpec

# An engine that crashed loads its weights again; Ray Serve starts it by itself.
BACK_WITHIN_S = 600.0
LOOK_EVERY_S = 2.0
ANSWERS_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Material:
    """What a study asks with; the same for every arm."""

    spec: StudySpec
    prompts: Mapping[str, Prompt]
    """By id."""
    salt_seed: int
    """The run's own."""
    context: str = ""
    """Text that context is cut from."""

    def prompt(self, cell: Cell, question: Question) -> Prompt:
        """The prompt as it is sent in this round: salted, with its context before it."""
        number = draw(cell, question)
        tokens = cell.point.context_tokens or 0
        prompt = self.prompts[question.prompt]
        if tokens and self.spec.context:
            size = round(tokens * self.spec.context.characters_per_token)
            start = number % max(len(self.context) - size, 1)
            prompt = _after(prompt, self.context[start : start + size])
        return salted(prompt, new_salt(self.salt_seed, number))

    def request(self, model: str, prompt: Prompt, max_tokens: int, seed: int) -> Request:
        """The request that asks `model` for the answer to `prompt`."""
        spec = self.spec
        options = {"max_tokens": max_tokens, "temperature": spec.temperature, **spec.request}
        if spec.temperature > 0:
            options["seed"] = seed
        return prompt_request(model, prompt, token_details=spec.token_details, **options)


class ArmLoad:
    """One arm's requests. `save` gets each record, `note` each event, as they come."""

    def __init__(
        self,
        arm: Arm,
        client: Client,
        material: Material,
        save: Callable[[RequestRecord], None],
        note: Callable[[EventKind, str], None],
        *,
        back_within_s: float = BACK_WITHIN_S,
    ) -> None:
        self._arm = arm
        self._client = client
        self._material = material
        self._save = save
        self._note = note
        self._back_within_s = back_within_s
        self._errors = 0
        self.given_up = False
        """Whether the rest of this arm's requests are left out."""

    async def run(self, cell: Cell, questions: Sequence[Question]) -> None:
        """Ask everything, `cell.point.streams` at a time; failures are recorded, not raised.

        Where the engine goes away, what was not asked yet waits until it is back.
        """
        waiting = deque(questions)
        while waiting and not self.given_up:
            failure = await self._loop(cell, waiting)
            if failure is not None and not self.given_up:
                await self._until_it_is_back(failure)

    async def warm_up(self) -> None:
        """Ask what does not count: kernels are set up, graphs captured, connections opened."""
        rule, streams = self._material.spec.warm_up, max(self._material.spec.streams)
        prompts = itertools.cycle(self._material.prompts.values())

        async def stream() -> None:
            for prompt, _ in zip(prompts, range(rule.requests_per_stream), strict=False):
                await self._send(salted(prompt, secrets.token_hex(8)), rule.max_tokens)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(streams):
                    group.create_task(stream())
        except* ApiFailureError as failures:
            self._count_error()
            await self._until_it_is_back(str(failures.exceptions[0]))

    async def _loop(self, cell: Cell, waiting: deque[Question]) -> str | None:
        """Ask until nothing waits or the engine fails; returns what it failed with."""
        failure: str | None = None

        async def stream() -> None:
            nonlocal failure
            while waiting and failure is None and not self.given_up:
                record = await self._ask(cell, waiting.popleft())
                self._save(record)
                if not record.ok:
                    self._count_error()
                if _may_be_gone(record):
                    failure = record.error

        async with asyncio.TaskGroup() as group:
            for _ in range(cell.point.streams):
                group.create_task(stream())
        return failure

    async def _ask(self, cell: Cell, question: Question) -> RequestRecord:
        prompt = self._material.prompt(cell, question)
        sent = Sent(
            cell=cell.id,
            round=cell.round,
            arm=self._arm.name,
            streams=cell.point.streams,
            category=cell.point.label,
            prompt=question.key,
            temperature=self._material.spec.temperature,
            max_tokens=cell.point.max_tokens,
            sent_at=time.time(),
            draft_tokens=self._arm.draft_tokens,
            again=cell.again,
        )
        ended: Result | ApiFailureError
        try:
            ended = await self._send(prompt, cell.point.max_tokens, draw(cell, question) % 2**31)
        except ApiFailureError as error:
            ended = error
        return as_record(sent, ended, keep_text=self._material.spec.keep_texts)

    async def _send(self, prompt: Prompt, max_tokens: int, seed: int = 0) -> Result:
        request = self._material.request(self._arm.model, prompt, max_tokens, seed)
        stream = self._client.stream(request)
        async for _ in stream:
            pass
        return stream.result

    def _count_error(self) -> None:
        self._errors += 1
        if self._errors >= self._material.spec.stop.max_errors and not self.given_up:
            self._leave_out(f"after {self._errors} failed requests")

    async def _until_it_is_back(self, failure: str) -> None:
        if await self._answers():
            return
        self._note("engine_lost", f"{self._arm.name} does not answer: {failure}")
        began = time.monotonic()
        while time.monotonic() - began < self._back_within_s:
            await asyncio.sleep(LOOK_EVERY_S)
            if await self._answers():
                away_s = time.monotonic() - began
                self._note("engine_back", f"{self._arm.name} answers again after {away_s:.0f} s")
                await self.warm_up()
                return
        self._leave_out(f"since it was not back within {self._back_within_s:.0f} s")

    def _leave_out(self, why: str) -> None:
        self.given_up = True
        self._note("arm_left_out", f"{self._arm.name} is left out {why}")

    async def _answers(self) -> bool:
        """Whether one token comes; a gateway may be ready while this arm's engine is not."""
        prompt = next(iter(self._material.prompts.values()))
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                await self._send(prompt, max_tokens=1)
        except (ApiFailureError, TimeoutError):
            return False
        return True


def _may_be_gone(record: RequestRecord) -> bool:
    return record.outcome in ("cut", "unreachable") or (record.status or 0) >= 500


def _after(prompt: Prompt, context: str) -> Prompt:
    if prompt.text is not None:
        return replace(prompt, text=f"{context}\n\n{prompt.text}")
    first, *rest = prompt.messages
    opened = {**first, "content": f"{context}\n\n{first['content']}"}
    return replace(prompt, messages=(opened, *rest))
