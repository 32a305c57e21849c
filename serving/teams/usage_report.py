"""What requests used, added up from the ledger.

Owns the sums and how `moe-serving usage` prints them. Leaves the rows to `ledger`, and who may
see which to the admin API.
"""

from __future__ import annotations

import csv
import json
import re
import sys
import time
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import sqlalchemy as sa
from rich.box import HORIZONTALS
from rich.table import Table
from rich.text import Text

from serving.console import console, fail
from serving.teams.accounts import parse_duration
from serving.teams.admin_values import By, UsageValue
from serving.teams.database import Database, database_url, open_database
from serving.teams.errors import TeamsError
from serving.teams.tables import usage

Form = Literal["table", "csv", "json"]
_DAY_S = 86_400


class UsageReport:
    """The sums of a database whose tables are up to date; a `Report` of the admin API."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def __call__(
        self,
        *,
        team: str | None = None,
        by: By = "day",
        since: float | None = None,
        until: float | None = None,
        models: Collection[str] | None = None,
    ) -> Sequence[UsageValue]:
        """See `Report`; ordered by team and group."""
        group = {"day": usage.c.at // _DAY_S, "model": usage.c.model, "key": usage.c.key_id}[by]
        tokens = (usage.c.prompt_tokens, usage.c.cached_tokens, usage.c.output_tokens)
        drafted = (usage.c.draft_tokens, usage.c.accepted_tokens)
        sums = [sa.func.sum(column) for column in (*tokens, *drafted, usage.c.cost)]
        query = (
            sa.select(usage.c.team, group, sa.func.count(), *sums)
            .where(*_conditions(team, since, until, models))
            .group_by(usage.c.team, group)
            .order_by(usage.c.team, group)
        )
        with self._database.read() as connection:
            return [_value(by, *row) for row in connection.execute(query)]


def show_usage(
    home: Path, *, team: str | None, by: By, since: str | None, form: Form = "table"
) -> None:
    """Print the sums from the database of the state folder `home`.

    `since` is a day or a time in UTC, or how long ago as in 7d. A TeamsError ends the program
    with its text.
    """
    try:
        start = None if since is None else parse_since(since, time.time())
        database = open_database(database_url(home))
        try:
            database.prepare()
            rows = UsageReport(database)(team=team, by=by, since=start)
        finally:
            database.close()
    except TeamsError as error:
        fail(str(error))
    _PRINT[form](rows, by)


def parse_since(text: str, now: float) -> float:
    """Unix time of `2026-01-31`, `2026-01-31T12:00Z` or `7d`; raises TeamsError."""
    if re.fullmatch(r"[0-9]+[smhdw]", text):
        return now - parse_duration("--since", text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise TeamsError(
            f"--since: found {text[:40]!r}; write a day or a time in UTC, as 2026-01-31 or "
            "2026-01-31T12:00, or how long ago, as 7d"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _conditions(
    team: str | None, since: float | None, until: float | None, models: Collection[str] | None
) -> list[sa.ColumnElement[bool]]:
    wanted: list[sa.ColumnElement[bool]] = []
    if team is not None:
        wanted.append(usage.c.team == team)
    if since is not None:
        wanted.append(usage.c.at >= since)
    if until is not None:
        wanted.append(usage.c.at < until)
    if models is not None:
        wanted.append(usage.c.model.in_(models))
    return wanted or [sa.true()]


def _value(
    by: By,
    team: str,
    group: float | str,
    requests: int,
    prompt: int,
    cached: int,
    output: int,
    draft: int | None,
    accepted: int | None,
    cost: float | None,
) -> UsageValue:
    if by == "day":
        group = datetime.fromtimestamp(float(group) * _DAY_S, UTC).strftime("%Y-%m-%d")
    return UsageValue(
        team=team,
        group=str(group),
        requests=requests,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        draft_tokens=draft,
        accepted_tokens=accepted,
        cost=cost,
    )


def _print_table(rows: Sequence[UsageValue], by: By) -> None:
    table = Table("team", "day (UTC)" if by == "day" else by, box=HORIZONTALS, pad_edge=False)
    for column in ("requests", "prompt", "cached", "output", "draft", "accepted", "cost"):
        table.add_column(column, justify="right")
    for row in rows:
        counts = (row.requests, row.prompt_tokens, row.cached_tokens, row.output_tokens)
        drafted = (row.draft_tokens, row.accepted_tokens)
        shown = ["" if count is None else f"{count:,}" for count in (*counts, *drafted)]
        cost = "" if row.cost is None else f"{row.cost:,.4f}"
        table.add_row(*map(Text, (row.team, row.group, *shown, cost)))
    console.print(table)


def _print_csv(rows: Sequence[UsageValue], by: By) -> None:
    names = list(UsageValue.model_fields)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(by if name == "group" else name for name in names)
    writer.writerows([getattr(row, name) for name in names] for row in rows)


def _print_json(rows: Sequence[UsageValue], by: By) -> None:
    print(json.dumps([_named(row, by) for row in rows], indent=2))


def _named(row: UsageValue, by: By) -> dict[str, object]:
    return {by if name == "group" else name: value for name, value in row.model_dump().items()}


_PRINT = {"table": _print_table, "csv": _print_csv, "json": _print_json}
