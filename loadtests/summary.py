"""What a load test shows at its end: one line per prompt category, and one for all.

Owns which figures are shown and how they are formed from the records. Leaves intervals and
comparisons to studies: a load test is one run of one server.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from rich.table import Table

from serving.studies.records import RequestRecord

COLUMNS = (
    "category",
    "requests",
    "failed",
    "TTFT ms",
    "TPOT ms",
    "tokens/s per stream",
    "tokens/s",
    "tokens per chunk",
    "acceptance rate",
    "mean acceptance length",
)


def as_table(records: Sequence[RequestRecord]) -> Table:
    """The figures of `records`; those of all together stand last."""
    table = Table(*COLUMNS, title="TTFT, TPOT and tokens/s per stream are medians")
    for category in sorted({record.category for record in records}):
        table.add_row(category, *figures([r for r in records if r.category == category]))
    table.add_section()
    table.add_row("all", *figures(records))
    return table


def figures(records: Sequence[RequestRecord]) -> tuple[str, ...]:
    """The columns after the first; empty where nothing was told."""
    whole = [record for record in records if record.ok]
    tokens = sum(record.completion_tokens or 0 for record in whole)
    told = [record.drafting for record in whole if record.drafting is not None]
    drafted, accepted = sum(d.drafted for d in told), sum(d.accepted for d in told)
    drafts = sum(d.drafts for d in told)
    tpot = _median(record.tpot_s for record in whole)
    return (
        str(len(records)),
        str(len(records) - len(whole)),
        _shown(1e3, _median(record.ttft_s for record in whole), ".1f"),
        _shown(1e3, tpot, ".2f"),
        _shown(1, 1 / tpot if tpot else None, ".1f"),
        _shown(1, _rate(tokens, whole), ".1f"),
        _shown(1, _tokens_per_chunk(whole), ".2f"),
        _shown(1, accepted / drafted if drafted else None, ".3f"),
        _shown(1, 1 + accepted / drafts if drafts else None, ".2f"),
    )


def _rate(tokens: int, whole: Sequence[RequestRecord]) -> float | None:
    """Tokens over the time from the first request to the end of the last."""
    spans = [(r.sent_at, r.sent_at + r.duration_s) for r in whole if r.duration_s is not None]
    if not spans:
        return None
    seconds = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return tokens / seconds if seconds else None


def _tokens_per_chunk(whole: Sequence[RequestRecord]) -> float | None:
    """Tokens per stream event after the first, which the prompt gave."""
    tokens = chunks = 0
    for record in whole:
        if record.completion_tokens and record.chunks and record.chunks > 1:
            tokens += record.completion_tokens - 1
            chunks += record.chunks - 1
    return tokens / chunks if chunks else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _shown(factor: float, value: float | None, form: str) -> str:
    return "" if value is None else format(factor * value, form)
