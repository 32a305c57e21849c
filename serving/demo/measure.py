"""Measures a demo model with vLLM and writes its model card.

    python -m serving.demo.measure tiny-moe

Owns the prompts, the figures and the card's text. Every number of the card comes
out of the run that writes it: acceptance and repetition per number of draft
tokens, greedy and sampled, and the decode speed-up as the median of interleaved
pairs. All engines are loaded at once, so that a pair's two halves meet the same
machine.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from multiprocessing import get_context
from typing import Any

from serving.demo import MODELS_DIR, NAMES, checkpoint_path
from serving.demo.corpus import HELD_OUT, library_root, read_source
from serving.telemetry.repetition import distinct_4grams

DRAFTS = (0, 1, 2, 3, 4, 5)
TOKENS = 96
SAMPLED = 0.7
# Sampling is measured for its acceptance, which two rounds tell as well as five.
SAMPLED_ROUNDS = 2
# What Ray gives an engine that sets aside less than two cores, as the demo stack's do.
OMP_THREADS = 1
# Written for this file, in the manner of code that is not in Python's library.
OWN_PROMPTS = (
    'class Inventory:\n    """Counts the parts in a warehouse."""\n\n    def __init__(self):\n',
    "def moving_average(values, window):\n    total = 0\n    result = []\n    for",
    "import os\n\ndef largest_files(folder, count=10):\n    sizes = []\n    for root, dirs",
    'def parse_temperature(text):\n    """Return degrees Celsius from \'21.5C\' or \'70F\'."""\n',
    "class RetryPolicy:\n    def __init__(self, attempts=3, delay=0.5):\n        self.attempts",
    "def merge_intervals(intervals):\n    if not intervals:\n        return []\n    intervals",
)


@dataclass(frozen=True)
class Row:
    """One engine's figures; `temperature` 0 is greedy.

    Acceptance is accepted / drafted tokens over all prompts, `per_position` the
    share of drafts whose k-th token was accepted. `distinct_4grams` is the share
    of different token 4-grams in an output, averaged over the outputs.
    """

    draft_tokens: int
    temperature: float
    acceptance: float | None
    per_position: tuple[float, ...]
    distinct_4grams: float
    speed_ups: tuple[float, ...]
    """Decode speed over that of no drafting, one per round."""

    @property
    def speed_up(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.speed_ups)


def held_out_prompts() -> list[str]:
    """The first half of the longest function of each module that training never saw."""
    prompts = []
    for name in HELD_OUT:
        source = read_source(library_root() / name)
        functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef))
        segments = [ast.get_source_segment(source, function) or "" for function in functions]
        lines = max(segments, key=len).splitlines(keepends=True)
        prompts.append("".join(lines[: min(20, len(lines) // 2)]))
    return prompts


@dataclass(frozen=True)
class Decoded:
    """What one engine made of the prompts, one after the other.

    `drafted` counts draft tokens, `accepted` the accepted ones by position.
    """

    outputs: tuple[tuple[int, ...], ...]
    tokens_per_second: float
    drafts: int = 0
    drafted: int = 0
    accepted: tuple[int, ...] = ()


class Engine:
    """vLLM with `draft_tokens` drafts per step, in a process of its own.

    vLLM's counters belong to a process, so two engines in one would mix them up.
    """

    def __init__(self, name: str, draft_tokens: int) -> None:
        self.draft_tokens = draft_tokens
        self._process = ProcessPoolExecutor(
            1, get_context("spawn"), initializer=_load, initargs=(name, draft_tokens)
        )

    def generate(self, prompts: Sequence[str], temperature: float, seed: int = 0) -> Decoded:
        """Decode `TOKENS` tokens per prompt, one prompt at a time."""
        return self._process.submit(_generate, prompts, temperature, seed).result()

    def close(self) -> None:
        """End the engine and its process, which would otherwise wait for the engine."""
        self._process.submit(_unload).result()
        self._process.shutdown()


_llm: Any = None


def _load(name: str, draft_tokens: int) -> None:
    global _llm
    from vllm import LLM

    speculative = {"method": "mtp", "num_speculative_tokens": draft_tokens}
    _llm = LLM(
        model=str(checkpoint_path(name)),
        max_model_len=2048,
        max_num_seqs=16,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculative if draft_tokens else None,
    )


def _unload() -> None:
    _llm.llm_engine.engine_core.shutdown()


def _generate(prompts: Sequence[str], temperature: float, seed: int) -> Decoded:
    from vllm import SamplingParams

    before, seconds = _counters(), 0.0
    outputs = []
    for prompt in prompts:
        seed += 1
        params = SamplingParams(
            temperature=temperature, max_tokens=TOKENS, ignore_eos=True, seed=seed
        )
        reply = _llm.generate([prompt], params, use_tqdm=False)[0]
        outputs.append(tuple(reply.outputs[0].token_ids))
        seconds += reply.metrics.last_token_ts - reply.metrics.first_token_ts
    drafts, drafted, *accepted = [a - b for a, b in zip(_counters(), before, strict=True)]
    decoded = sum(len(tokens) - 1 for tokens in outputs)
    return Decoded(tuple(outputs), decoded / seconds, drafts, drafted, tuple(accepted))


def _counters() -> list[int]:
    """Drafts, draft tokens, then accepted tokens by position; zeros without drafting."""
    values: dict[str, Any] = {metric.name: metric for metric in _llm.get_metrics()}
    if "vllm:spec_decode_num_drafts" not in values:
        return [0, 0]
    return [
        values["vllm:spec_decode_num_drafts"].value,
        values["vllm:spec_decode_num_draft_tokens"].value,
        *values["vllm:spec_decode_num_accepted_tokens_per_pos"].values,
    ]


def measure(engines: Sequence[Engine], temperature: float, rounds: int) -> list[Row]:
    """Every engine's figures at one temperature; engines take turns within a round."""
    prompts = [*held_out_prompts(), *OWN_PROMPTS]
    for engine in engines:
        engine.generate(prompts[:2], temperature)
    runs: dict[int, list[Decoded]] = {engine.draft_tokens: [] for engine in engines}
    order = list(engines)
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for engine in order:
            decoded = engine.generate(prompts, temperature, seed=1000 * number)
            runs[engine.draft_tokens].append(decoded)
    return [_row(n, temperature, runs[n], runs[0]) for n in sorted(runs)]


def _row(n: int, temperature: float, runs: Sequence[Decoded], plain: Sequence[Decoded]) -> Row:
    accepted = [sum(counts) for counts in zip(*(run.accepted for run in runs), strict=True)]
    drafts = sum(run.drafts for run in runs)
    return Row(
        draft_tokens=n,
        temperature=temperature,
        acceptance=sum(accepted) / sum(run.drafted for run in runs) if n else None,
        per_position=tuple(count / drafts for count in accepted),
        distinct_4grams=statistics.mean(
            share
            for run in runs
            for tokens in run.outputs
            if (share := distinct_4grams(tokens)) is not None
        ),
        speed_ups=tuple(
            run.tokens_per_second / other.tokens_per_second
            for run, other in zip(runs, plain, strict=True)
        ),
    )


def card(name: str, rows: Sequence[Row], training: dict[str, Any], rounds: int) -> str:
    """The model card in Markdown."""
    greedy = [row for row in rows if row.temperature == 0]
    best = max((row for row in greedy if row.draft_tokens), key=lambda row: row.speed_up)
    prompts = len(held_out_prompts()) + len(OWN_PROMPTS)
    table = "\n".join(_line(row) for row in rows)
    config = json.loads((MODELS_DIR / name / "config.json").read_text())
    kind = "A mixture of experts (8, 2 active, 1 shared)" if "moe" in name else "A dense model"
    return f"""---
license: apache-2.0
library_name: vllm
---

# {name}

{kind} of the Qwen3.5 architecture with {training["parameters"] / 1e6:.2f} M parameters,
{config["num_hidden_layers"]} layers and one more for multi-token prediction (MTP), made to show
speculative decoding on a CPU. It writes text that looks like Python and knows nothing.

## Training

`python -m serving.demo.train {name}`: {training["tokens"] / 1e6:.0f} M tokens of Python
{training["python"]}'s standard library (PSF licence; {training["corpus_tokens"] / 1e6:.1f} M
different ones, some modules held out), seed {training["seed"]}, {training["minutes"]:.0f} minutes
on {training["threads"]} CPU threads. The MTP layer was trained over three recursive steps.

## Measured

`python -m serving.demo.measure {name}` wrote this section: vLLM {_vllm_version()} on
{os.cpu_count()} CPU cores ({platform.machine()}), {OMP_THREADS} OpenMP thread for each engine
as in the demo stack, one stream, {prompts} code prompts that are not in the training text,
{TOKENS} tokens each. Acceptance is accepted / drafted tokens. The 4-grams tell how much the text
repeats itself: loops flatter acceptance. The speed-up is decode speed over that of n = 0, the
median of {rounds} interleaved pairs, of {SAMPLED_ROUNDS} when sampling (lowest to highest).

| n | temperature | acceptance | by position | distinct 4-grams | speed-up |
|---|---|---|---|---|---|
{table}

Fastest in greedy decoding: n = {best.draft_tokens}, {best.speed_up:.2f} times the speed of n = 0.
"""


def _line(row: Row) -> str:
    acceptance = "" if row.acceptance is None else f"{row.acceptance:.2f}"
    positions = " ".join(f"{share:.2f}" for share in row.per_position)
    low, high = min(row.speed_ups), max(row.speed_ups)
    speed = f"{row.speed_up:.2f} ({low:.2f} to {high:.2f})" if row.draft_tokens else "1"
    return (
        f"| {row.draft_tokens} | {row.temperature or 'greedy'} | {acceptance} | {positions} "
        f"| {row.distinct_4grams:.2f} | {speed} |"
    )


def _vllm_version() -> str:
    # The CPU build is a distribution of another name, and importing vLLM takes half a minute.
    return metadata.version(metadata.packages_distributions()["vllm"][0])


def main() -> None:
    """Measure the named model and write its card."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=NAMES)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds")
    arguments = parser.parse_args()
    name = arguments.model
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ["OMP_NUM_THREADS"] = str(OMP_THREADS)
    engines = [Engine(name, n) for n in DRAFTS]
    try:
        rows = [
            row
            for temperature, rounds in ((0.0, arguments.rounds), (SAMPLED, SAMPLED_ROUNDS))
            for row in measure(engines, temperature, rounds)
        ]
    finally:
        for engine in engines:
            engine.close()
    training = json.loads((MODELS_DIR / name / "training.json").read_text())
    (MODELS_DIR / name / "README.md").write_text(card(name, rows, training, arguments.rounds))
    print("\n".join(_line(row) for row in rows))


if __name__ == "__main__":
    main()
