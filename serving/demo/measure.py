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
from dataclasses import dataclass
from typing import Any

from serving.demo import MODELS_DIR, NAMES, checkpoint_path
from serving.demo.corpus import HELD_OUT, library_root, read_source

DRAFTS = (0, 1, 2, 3)
TOKENS = 128
SAMPLED = 0.7
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


def distinct_share(tokens: Sequence[int], size: int = 4) -> float:
    """The share of different n-grams among all of `tokens`; 1.0 where nothing repeats."""
    grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


class Engine:
    """vLLM in a process of its own, with `draft_tokens` drafts per step."""

    def __init__(self, name: str, draft_tokens: int) -> None:
        from vllm import LLM

        self.draft_tokens = draft_tokens
        speculative = {"method": "mtp", "num_speculative_tokens": draft_tokens}
        self._llm = LLM(
            model=str(checkpoint_path(name)),
            max_model_len=2048,
            max_num_seqs=16,
            enable_prefix_caching=False,
            disable_log_stats=False,
            speculative_config=speculative if draft_tokens else None,
        )

    def generate(self, prompts: Sequence[str], temperature: float) -> tuple[list[Any], float]:
        """Outputs of one prompt after the other, and decoded tokens per second."""
        from vllm import SamplingParams

        outputs, tokens, seconds = [], 0, 0.0
        for number, prompt in enumerate(prompts):
            params = SamplingParams(
                temperature=temperature, max_tokens=TOKENS, ignore_eos=True, seed=number
            )
            output = self._llm.generate([prompt], params, use_tqdm=False)[0]
            outputs.append(output.outputs[0].token_ids)
            times = output.metrics
            tokens += len(output.outputs[0].token_ids) - 1
            seconds += times.last_token_ts - times.first_token_ts
        return outputs, tokens / seconds

    def drafted(self) -> tuple[int, int, list[int]]:
        """Drafts and draft tokens so far, and accepted tokens by position."""
        values: dict[str, Any] = {m.name: m for m in self._llm.get_metrics()}
        if not self.draft_tokens:
            return 0, 0, []
        return (
            values["vllm:spec_decode_num_drafts"].value,
            values["vllm:spec_decode_num_draft_tokens"].value,
            list(values["vllm:spec_decode_num_accepted_tokens_per_pos"].values),
        )


def measure(engines: Sequence[Engine], temperature: float, rounds: int) -> list[Row]:
    """Every engine's figures at one temperature, engines taking turns within a round."""
    prompts = [*held_out_prompts(), *OWN_PROMPTS]
    for engine in engines:
        engine.generate(prompts[:1], temperature)
    before = {engine.draft_tokens: engine.drafted() for engine in engines}
    speeds: dict[int, list[float]] = {engine.draft_tokens: [] for engine in engines}
    outputs: dict[int, list[Any]] = {}
    order = list(engines)
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for engine in order:
            outputs[engine.draft_tokens], speed = engine.generate(prompts, temperature)
            speeds[engine.draft_tokens].append(speed)
    return [
        _row(engine, temperature, before[engine.draft_tokens], outputs, speeds)
        for engine in engines
    ]


def _row(
    engine: Engine,
    temperature: float,
    before: tuple[int, int, list[int]],
    outputs: dict[int, list[Any]],
    speeds: dict[int, list[float]],
) -> Row:
    n = engine.draft_tokens
    drafts, drafted, accepted = engine.drafted()
    drafts, drafted = drafts - before[0], drafted - before[1]
    by_position = [now - then for now, then in zip(accepted, before[2], strict=True)]
    return Row(
        draft_tokens=n,
        temperature=temperature,
        acceptance=sum(by_position) / drafted if n else None,
        per_position=tuple(count / drafts for count in by_position),
        distinct_4grams=statistics.mean(distinct_share(tokens) for tokens in outputs[n]),
        speed_ups=tuple(a / b for a, b in zip(speeds[n], speeds[0], strict=True)),
    )


def card(name: str, rows: Sequence[Row], training: dict[str, Any], rounds: int) -> str:
    """The model card in Markdown."""
    greedy = [row for row in rows if row.temperature == 0]
    best = max((row for row in greedy if row.draft_tokens), key=lambda row: row.speed_up)
    prompts = len(held_out_prompts()) + len(OWN_PROMPTS)
    table = "\n".join(_line(row) for row in rows)
    kind = "mixture of experts (8 routed, 2 active, 1 shared)" if "moe" in name else "dense"
    return f"""---
license: apache-2.0
library_name: vllm
---

# {name}

A {kind} model of the Qwen3.5 architecture with {training["parameters"] / 1e6:.2f} M parameters and
one layer for multi-token prediction (MTP), made to show speculative decoding on a CPU. It writes
text that looks like Python and knows nothing.

## Training

`python -m serving.demo.train {name}`: {training["tokens"] / 1e6:.0f} M tokens of Python
{training["python"]}'s standard library (PSF licence; {training["corpus_tokens"] / 1e6:.1f} M
different tokens, some modules held out), seed {training["seed"]}, {training["minutes"]:.0f} minutes
on {training["threads"]} CPU threads. The MTP layer was trained over three recursive steps.

## Measured

`python -m serving.demo.measure {name}` wrote this section: vLLM {_vllm_version()} on
{os.cpu_count()} CPU cores ({platform.machine()}), one stream, {prompts} code prompts that are not
in the training text, {TOKENS} tokens each. Acceptance is accepted / drafted tokens. The 4-grams
tell how much the text repeats itself: loops flatter acceptance. The speed-up is decode speed over
that of n = 0, the median of {rounds} interleaved pairs (lowest to highest).

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
    import vllm

    return str(vllm.__version__)


def main() -> None:
    """Measure the named model and write its card."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=NAMES)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds")
    arguments = parser.parse_args()
    name = arguments.model
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    engines = [Engine(name, n) for n in DRAFTS]
    rows = [
        row
        for temperature in (0.0, SAMPLED)
        for row in measure(engines, temperature, arguments.rounds)
    ]
    training = json.loads((MODELS_DIR / name / "training.json").read_text())
    (MODELS_DIR / name / "README.md").write_text(card(name, rows, training, arguments.rounds))
    print("\n".join(_line(row) for row in rows))


if __name__ == "__main__":
    main()
