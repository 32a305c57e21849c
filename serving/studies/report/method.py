"""How a run's figures came about, in words.

Owns these words. They quote the constants that the figures were made with, and say only what
holds for the run at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from serving.studies import statistics
from serving.studies.analysis.findings import Analysis
from serving.studies.lossless import NOISE_NATS, Agreement
from serving.studies.records import Event
from serving.studies.report.content import Remark

_BLOCKS = {
    "all-at-once": "All arms are up at the same time, and each round takes every arm in turn "
    "under every load, in an order that turns from round to round. At the end plain is asked "
    "its first round again, for drift and its own sameness only.",
    "pairs": "One arm at a time is up beside plain. The two take turns within each round, and "
    "at the end of each such block plain is asked its first round again, for drift and its own "
    "sameness only. Arms are compared with the plain of their own block.",
    "one-by-one": "One arm at a time is up, each between two blocks of plain, with which it is "
    "compared round by round. The last block of plain is its first one again, for drift and its "
    "own sameness only. Slow drift of the machine does not cancel as well as where arms take "
    "turns.",
}
_LIVE = (
    "Live traffic, as it came. Each session was given its arm by a draw with equal chances, so no "
    "two requests are a pair, and the arms differ by who asked what as well. Times are the "
    "gateway's own: from a request's arrival, the wait for a slot included."
)
_TIMES = (
    Remark(
        "Tokens",
        "Prompt and output tokens are those of the server's usage record, never a count of "
        "stream events: with MTP one event carries several tokens.",
    ),
    Remark(
        "TTFT and TPOT",
        "TTFT is from sending a request to its first text. TPOT is (duration − TTFT) / (output "
        "tokens − 1). Both are seen by the client, with the network and the server's queue "
        "within.",
    ),
    Remark(
        "Throughput",
        "Output tokens of whole answers, over all streams, divided by the time in which at "
        "least one request of the arm ran.",
    ),
)
_ACCEPTANCE = Remark(
    "Acceptance",
    "As vLLM's metrics define it. Acceptance rate: accepted / drafted tokens. Mean acceptance "
    "length: 1 + accepted / drafts, the model's own token included. Rate at place i: accepted "
    "at i / drafts, so it never rises; “given”: rate at i / rate at i − 1. Intervals are "
    "Wilson's, which take tokens as independent; those of one draft are not, so for n > 1 they "
    "are somewhat too narrow. Counters that several requests share are not used.",
)


def method(analysis: Analysis, agreements: Sequence[Agreement]) -> tuple[Remark, ...]:
    """The paragraphs that hold for this run."""
    found = [_order(analysis), *_TIMES]
    if analysis.speedups:
        found.append(_speedup())
    if analysis.acceptances:
        found.append(_ACCEPTANCE)
    if agreements:
        found.append(_sameness())
    found.append(_failures())
    if analysis.study.events:
        found.append(_events(analysis.study.events))
    return tuple(found)


def _order(analysis: Analysis) -> Remark:
    spec = analysis.study.spec
    if spec.get("blocks") == "live":
        return Remark("Order", _LIVE)
    words = _BLOCKS.get(str(spec.get("blocks")), "")
    sampling = f"Temperature {spec['temperature']:g}." if "temperature" in spec else ""
    text = (
        f"{words} A request is sent when one before it has ended, so that as many are in flight "
        "as streams are named; open-loop load has 0 streams. Every arm gets the same prompts in "
        "the same order, each with a short text before it that is new in every round, so that no "
        f"prefix cache answers it. {sampling}"
    )
    return Remark("Order", text.strip())


def _speedup() -> Remark:
    return Remark(
        "Speed-up",
        "Compared in pairs: the same prompt in the same round under the same load, by the arm "
        "and by plain. “Decode” is the ratio of the medians of 1 / TPOT; “end to end” that of "
        "the medians of the duration. The interval is the percentile bootstrap over prompts "
        f"({statistics.CONFIDENCE:.0%}, {statistics.RESAMPLES:,} resamples, seed "
        f"{statistics.SEED}): rounds of one prompt are not counted as new evidence. Faster or "
        "slower means that the whole interval lies above or below 1. The two other figures that "
        "people quote stand beside it, since they can disagree: the ratio of mean tokens/s, and "
        "plain's time for the whole set over the arm's.",
    )


def _sameness() -> Remark:
    return Remark(
        "Losslessness",
        "Whole greedy answers to the same prompt in the same round are compared token by "
        "token, or by character where a server gives no token ids; plain's last pass is compared "
        "with the round that it repeats. A verified step adds up in "
        "another order, which bf16 rounds otherwise; a difference where plain's two likeliest "
        f"tokens were at most {NOISE_NATS:g} nats apart is within that noise.",
    )


def _failures() -> Remark:
    return Remark(
        "Failures",
        "A refused, cut or unanswered request is an error. It is counted, and is in no "
        "comparison, median or rate.",
    )


def _events(events: Sequence[Event]) -> Remark:
    lines = (
        f"{datetime.fromtimestamp(each.at, UTC):%Y-%m-%d %H:%M:%S} UTC: {each.text}"
        for each in events
    )
    return Remark("Events", "; ".join(lines))
