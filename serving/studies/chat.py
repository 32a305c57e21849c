"""Talking to a model in the terminal.

Owns the conversation, what Ctrl-C and Ctrl-D do, and the line under each answer.
Leaves the connection to `client`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from serving.studies.client import ApiFailureError, Client, Piece, Result, Stream

DIM, RESET = "\x1b[2m", "\x1b[0m"


@dataclass(slots=True)
class Conversation:
    """What is asked of which model, and what was said so far."""

    model: str
    options: Mapping[str, Any]
    """The request's other fields, as max_tokens and temperature."""
    completion: bool = False
    """Continue each text as it stands: no chat template, nothing remembered."""
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, client: Client, text: str) -> Stream:
        """The stream that answers `text`."""
        if self.completion:
            return client.completion(self.model, text, **self.options)
        self.messages.append({"role": "user", "content": text})
        return client.chat(self.model, self.messages, **self.options)

    def answered(self, text: str) -> None:
        """Remember an answer, whole or stopped."""
        if not self.completion:
            self.messages.append({"role": "assistant", "content": text})

    def failed(self) -> None:
        """Forget a question that got no answer."""
        if not self.completion:
            self.messages.pop()


def run_chat(
    url: str,
    model: str | None,
    prompt: str | None,
    options: Mapping[str, Any],
    *,
    completion: bool = False,
    api_key: str | None = None,
) -> None:
    """Answer `prompt`, or every line typed until Ctrl-D; Ctrl-C stops an answer.

    Without `model`, the first one the server names is asked. Raises ApiFailureError
    where the server cannot be reached or refuses `prompt`; in a conversation a
    refused question is printed and the next one awaited.
    """
    with asyncio.Runner() as runner, contextlib.closing(_Session(runner, url, api_key)) as session:
        names = runner.run(_models(session.client))
        if not (model or names):
            raise ApiFailureError(f"{url} serves no model")
        conversation = Conversation(model or names[0], options, completion)
        if prompt is not None:
            runner.run(_answer(session.client, conversation, prompt))
            return
        print(f"{conversation.model} at {url}. Ctrl-C stops an answer, Ctrl-D ends.")
        while (line := _next_line()) is not None:
            _turn(runner, session.client, conversation, line)


async def _models(client: Client) -> list[str]:
    try:
        return await client.models()
    except ApiFailureError as error:
        if error.status is not None:
            raise
        cure = "start a stack with `moe-serving up demo`, or name a server with --url"
        raise ApiFailureError(f"{error}; {cure}") from None


class _Session:
    """The client, opened and closed in the runner's loop."""

    def __init__(self, runner: asyncio.Runner, url: str, api_key: str | None) -> None:
        self._runner = runner
        self.client = Client(url, api_key=api_key)
        runner.run(self.client.__aenter__())

    def close(self) -> None:
        self._runner.run(self.client.__aexit__(None, None, None))


def _next_line() -> str | None:
    """The next line that is not empty; None at the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() a history and line editing
    while True:
        try:
            line = input("\n> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()
            continue
        if line.strip():
            return line


def _turn(runner: asyncio.Runner, client: Client, conversation: Conversation, line: str) -> None:
    try:
        runner.run(_answer(client, conversation, line))
    except ApiFailureError as error:
        print(f"\nerror: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\n[stopped]")


async def _answer(client: Client, conversation: Conversation, text: str) -> None:
    stream = conversation.ask(client, text)
    said: list[str] = []
    try:
        await _print(stream, said.append)
    except ApiFailureError:
        conversation.failed()
        raise
    except asyncio.CancelledError:
        conversation.answered("".join(said))
        raise
    conversation.answered("".join(said))
    print(f"\n{_dim(summary(stream.result))}")


async def _print(stream: Stream, keep: Callable[[str], None]) -> None:
    async for piece in stream:
        print(_shown(piece), end="", flush=True)
        if not piece.reasoning:
            keep(piece.text)


def _shown(piece: Piece) -> str:
    text = printable(piece.text)
    return _dim(text) if piece.reasoning else text


def _dim(text: str) -> str:
    return f"{DIM}{text}{RESET}" if sys.stdout.isatty() else text


def printable(text: str) -> str:
    """`text` without control characters but line ends and tabs.

    A model's text is not to move the terminal's cursor or change its title.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def summary(result: Result) -> str:
    """The line under an answer: speed, what was drafted and accepted, and who answered."""
    parts = [f"{result.completion_tokens} tokens"]
    if result.completion_tokens > 1 and result.tpot_s > 0:
        parts.append(f"{1 / result.tpot_s:.1f} tokens/s after the first")
    if result.ttft_s == result.ttft_s:
        parts.append(f"first after {1e3 * result.ttft_s:.0f} ms")
    if drafted := result.speculation:
        parts.append(
            f"accepted {drafted.accepted} of {drafted.drafted} draft tokens "
            f"({drafted.acceptance_rate:.2f}), "
            f"mean acceptance length {drafted.mean_acceptance_length:.2f}"
        )
    if variant := result.headers.get("x-moe-serving-variant"):
        parts.append(f"variant {variant}")
    return " · ".join(parts)
