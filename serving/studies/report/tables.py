"""An analysis in tables, and in files for a spreadsheet.

Owns which figures stand together and their units. Leaves their meaning to `analysis`.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from serving.studies.analysis.findings import Acceptance, Analysis, Load, Setting, Speedup
from serving.studies.lossless import NOISE_NATS, Agreement
from serving.studies.records import RequestRecord
from serving.studies.report.content import NONE, Column, Table, interval, milliseconds, number
from serving.studies.statistics import Estimate

MAX_ROWS = 60
"""Of a table in a page; files hold all."""
ALL = "all"
SETTING = ("streams", "max tokens", "temp.")
"""Columns of `setting_cells`."""
FOLDED = {"max tokens": "max tokens", "temp.": "temperature"}
"""Columns that go into the note where all rows say the same, and their names there."""

T = TypeVar("T")
# A cell that begins so is a formula to a spreadsheet.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def tables(analysis: Analysis, agreements: Sequence[Agreement]) -> tuple[Table, ...]:
    """The tables that this run has rows for, in the order of a report."""
    found = (
        _speedups(analysis),
        _best(analysis),
        _loads(analysis),
        _acceptances(analysis),
        _places(analysis),
        _crossovers(analysis),
        _break_evens(analysis),
        _sameness(agreements),
        _energy(analysis.joules_per_token),
    )
    return tuple(finished(table) for table in found if table.rows)


def environment(facts: Mapping[str, str]) -> Table:
    """What it ran on."""
    return Table("Environment", columns("fact|", "value|"), tuple(facts.items()))


def arms(analysis: Analysis) -> Table:
    """What was compared."""
    return Table(
        "Arms",
        columns("arm|", "engine|", "model|", "variant|", "n", "URL|"),
        tuple(
            (
                each.name,
                each.engine,
                each.model,
                analysis.variants.get(each.name, each.name),
                NONE if each.draft_tokens is None else str(each.draft_tokens),
                each.url,
            )
            for each in analysis.study.arms
        ),
    )


def write_summary(analysis: Analysis, file: Path) -> Path:
    """A line for each arm in each setting. Times in seconds, speed-ups with their interval."""
    pairs = {(each.arm, each.setting): each for each in analysis.speedups}
    loads = {(each.arm, each.setting): each for each in analysis.loads}
    n = {arm.name: arm.draft_tokens for arm in analysis.study.arms}
    lines = (
        {
            "arm": arm,
            "draft_tokens": n.get(arm),
            **_setting_fields(setting),
            **_load_fields(loads.get((arm, setting))),
            **_speedup_fields(pairs.get((arm, setting))),
        }
        for arm, setting in dict.fromkeys((*loads, *pairs))
    )
    return _write(file, lines)


def write_acceptance(analysis: Analysis, file: Path) -> Path:
    """A line for each arm and category that drafted."""
    return _write(file, (_acceptance_fields(each) for each in analysis.acceptances))


def write_requests(requests: Iterable[RequestRecord], file: Path) -> Path:
    """A line for each request, in the order they ended, without its text."""
    left_out = {"text", "token_ids", "logprob_gaps", "drafting"}
    return _write(
        file,
        (
            {
                **each.model_dump(exclude=left_out),
                "tpot_s": each.tpot_s,
                "drafts": each.drafting and each.drafting.drafts,
                "drafted": each.drafting and each.drafting.drafted,
                "accepted": each.drafting and each.drafting.accepted,
            }
            for each in requests
        ),
    )


def columns(*labels: str) -> tuple[Column, ...]:
    """A column for each label; one that ends in "|" holds words."""
    return tuple(Column(label.rstrip("|"), not label.endswith("|")) for label in labels)


def finished(table: Table) -> Table:
    """The table without setting columns that say the same in every row, and at most MAX_ROWS rows.

    What is left out is said in the note.
    """
    same = [
        place
        for place, column in enumerate(table.columns)
        if column.label in FOLDED and len({row[place] for row in table.rows}) == 1
    ]
    said = [f"{FOLDED[table.columns[place].label]} {table.rows[0][place]}" for place in same]
    left_out = len(table.rows) - MAX_ROWS
    notes = (
        table.note,
        f"All at {' and '.join(said)}." if said else "",
        f"{left_out} more rows are in the CSV files." if left_out > 0 else "",
    )
    return Table(
        table.title,
        _without(table.columns, same),
        tuple(_without(row, same) for row in table.rows[:MAX_ROWS]),
        " ".join(note for note in notes if note),
    )


def _without(cells: tuple[T, ...], places: Sequence[int]) -> tuple[T, ...]:
    return tuple(cell for place, cell in enumerate(cells) if place not in places)


def setting_cells(setting: Setting) -> tuple[str, str, str]:
    """The cells under SETTING."""
    return (
        str(setting.streams) if setting.streams else "open",
        str(setting.max_tokens),
        f"{setting.temperature:g}",
    )


def _speedups(analysis: Analysis) -> Table:
    return Table(
        "Speed-up over plain, all categories",
        columns(
            "arm|",
            *SETTING,
            "decode",
            "verdict|",
            "end to end",
            "by mean tokens/s",
            "by wall clock",
            "prompts",
            "pairs",
        ),
        tuple(
            (
                each.arm,
                *setting_cells(each.setting),
                interval(each.decode),
                each.decode.verdict if each.decode else NONE,
                interval(each.end_to_end),
                number(each.by_mean_tokens_per_s),
                number(each.by_wall_clock),
                str(each.prompts),
                str(each.pairs),
            )
            for each in analysis.speedups
            if each.setting.category is None
        ),
        "Above 1 the arm is faster than plain. In brackets the 95 % interval.",
    )


def _best(analysis: Analysis) -> Table:
    return Table(
        "Fastest variant by category and number of streams",
        columns(
            "category|",
            *SETTING,
            "fastest|",
            "decode speed-up",
            "against plain|",
            "no different from|",
        ),
        tuple(
            (
                each.setting.category or ALL,
                *setting_cells(each.setting),
                each.arm,
                interval(each.speedup),
                each.verdict,
                ", ".join(each.no_difference_from) or NONE,
            )
            for each in analysis.best
        ),
        "Variants whose intervals overlap are no different from each other as far as this run "
        "can tell.",
    )


def _loads(analysis: Analysis) -> Table:
    return Table(
        "Throughput and latency, all categories",
        columns(
            "arm|",
            *SETTING,
            "tokens/s",
            "TTFT ms",
            "TTFT p95",
            "TPOT ms",
            "TPOT p95",
            "requests",
            "errors",
        ),
        tuple(
            (
                each.arm,
                *setting_cells(each.setting),
                number(each.tokens_per_s, 1),
                milliseconds(each.ttft_median_s),
                milliseconds(each.ttft_p95_s),
                milliseconds(each.tpot_median_s),
                milliseconds(each.tpot_p95_s),
                str(each.requests),
                str(each.errors),
            )
            for each in analysis.loads
        ),
        "Medians and 95th percentiles of whole answers; tokens/s is of all streams together.",
    )


def _acceptances(analysis: Analysis) -> Table:
    return Table(
        "Acceptance by category",
        columns(
            "arm|",
            "category|",
            "temp.",
            "drafted",
            "acceptance rate",
            "mean acceptance length",
            "expected tokens per step",
            "tokens per chunk",
        ),
        tuple(
            (
                each.arm,
                each.category or ALL,
                f"{each.temperature:g}",
                number(each.drafted, 0),
                interval(each.rate),
                number(each.mean_length),
                number(each.expected_tokens_per_step),
                number(each.tokens_per_chunk),
            )
            for each in analysis.acceptances
        ),
        "Mean acceptance length is by the engine's counts; expected is what it would be if every "
        "place were accepted like the first; tokens per chunk is what the client saw.",
    )


def _places(analysis: Analysis) -> Table:
    overall = [each for each in analysis.acceptances if each.category is None and each.per_position]
    places = max((len(each.per_position) for each in overall), default=0)

    def row(each: Acceptance, kind: str, rates: Sequence[Estimate | None]) -> tuple[str, ...]:
        empty = [""] * (places - len(rates))
        return each.arm, f"{each.temperature:g}", kind, *map(interval, rates), *empty

    rows = [
        row(each, kind, rates)
        for each in overall
        for kind, rates in (("of all drafts", each.per_position), ("given", each.conditional))
    ]
    return Table(
        "Acceptance by place in the draft, all categories",
        columns("arm|", "temp.", "rate|", *(f"place {place}" for place in range(1, places + 1))),
        tuple(rows),
        "“Of all drafts” counts a token as refused where one before it was; “given” is among "
        "drafts whose tokens before it were all accepted.",
    )


def _crossovers(analysis: Analysis) -> Table:
    return Table(
        "Where the gain stops: streams",
        columns("arm|", "category|", "streams tried|", "gain gone from", "plain faster from"),
        tuple(
            (
                each.arm,
                each.category or ALL,
                ", ".join(map(str, each.tried)),
                _or_never(each.gain_gone_from),
                _or_never(each.plain_faster_from),
            )
            for each in analysis.crossovers
            if len(each.tried) > 1
        ),
        "By decode speed. “Not seen” holds for the numbers tried, not beyond.",
    )


def _break_evens(analysis: Analysis) -> Table:
    return Table(
        "Where the gain begins: output length",
        columns("arm|", "category|", "streams", "lengths tried|", "faster from", "slower up to"),
        tuple(
            (
                each.arm,
                each.category or ALL,
                str(each.streams),
                ", ".join(map(str, each.tried)),
                _or_never(each.faster_from),
                _or_never(each.plain_faster_to),
            )
            for each in analysis.break_evens
            if len(each.tried) > 1
        ),
        "In tokens, by time from request to end, the prompt's processing included.",
    )


def _sameness(agreements: Sequence[Agreement]) -> Table:
    return Table(
        "Losslessness: greedy answers beside plain's",
        columns(
            "arm|",
            "compared by|",
            "answers",
            "identical",
            "differ within noise",
            "beyond noise",
            "gap not known",
            "first difference at (median)",
        ),
        tuple(
            (
                each.arm,
                " and ".join(each.units),
                str(each.compared),
                interval(each.share, 3),
                str(each.within_noise),
                str(each.beyond_noise),
                str(len(each.differences) - each.within_noise - each.beyond_noise),
                _median(difference.position for difference in each.differences),
            )
            for each in agreements
        ),
        "Plain's own row compares its answers at the end with those to the same prompts before: "
        "what it does not repeat itself, no variant can. A difference is within noise where "
        f"plain's first and second choice were at most {NOISE_NATS:g} nats apart.",
    )


def _energy(joules_per_token: Mapping[str, float]) -> Table:
    rows = tuple((arm, number(joules, 3)) for arm, joules in joules_per_token.items())
    return Table("Energy", columns("arm|", "joules per output token"), rows)


def _or_never(value: int | None) -> str:
    return "not seen" if value is None else str(value)


def _median(positions: Iterable[int]) -> str:
    found = list(positions)
    return f"{statistics.median(found):g}" if found else NONE


def _setting_fields(setting: Setting) -> dict[str, Any]:
    return {
        "category": setting.category or ALL,
        "streams": setting.streams,
        "max_tokens": setting.max_tokens,
        "temperature": setting.temperature,
    }


def _load_fields(load: Load | None) -> dict[str, Any]:
    names = ("requests", "errors", "tokens_per_s")
    times = ("ttft_median_s", "ttft_p95_s", "tpot_median_s", "tpot_p95_s")
    return {name: getattr(load, name, None) for name in (*names, *times)}


def _speedup_fields(pair: Speedup | None) -> dict[str, Any]:
    decode = pair.decode if pair else None
    return {
        "pairs": pair and pair.pairs,
        "prompts": pair and pair.prompts,
        **_estimate_fields("decode_speedup", decode),
        "verdict": decode and decode.verdict,
        **_estimate_fields("end_to_end_speedup", pair.end_to_end if pair else None),
        "speedup_by_mean_tokens_per_s": pair and pair.by_mean_tokens_per_s,
        "speedup_by_wall_clock": pair and pair.by_wall_clock,
    }


def _acceptance_fields(each: Acceptance) -> dict[str, Any]:
    return {
        "arm": each.arm,
        "category": each.category or ALL,
        "temperature": each.temperature,
        "drafts": each.drafts,
        "drafted": each.drafted,
        "accepted": each.accepted,
        **_estimate_fields("acceptance_rate", each.rate),
        "mean_acceptance_length": each.mean_length,
        "expected_tokens_per_step": each.expected_tokens_per_step,
        "tokens_per_chunk": each.tokens_per_chunk,
        "per_position": " ".join(f"{rate.value:.6g}" for rate in each.per_position),
    }


def _estimate_fields(name: str, estimate: Estimate | None) -> dict[str, Any]:
    return {
        name: estimate and estimate.value,
        f"{name}_low": estimate and estimate.low,
        f"{name}_high": estimate and estimate.high,
    }


def _write(file: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    rows = list(lines)
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out)
        if rows:
            writer.writerow(rows[0])
        writer.writerows([_cell(value) for value in row.values()] for row in rows)
    return file


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return value
