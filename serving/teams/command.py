"""`moe-serving keys`, `teams`, `prices` and `db`.

Owns options and what is printed; `accounts` and `database` do the work. The context's `obj` is a
function that returns the state folder, which the program that adds these commands gives.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from pydantic import ValidationError
from rich.box import HORIZONTALS
from rich.table import Table
from rich.text import Text

from serving.console import console, errors, fail
from serving.router.request import Priority
from serving.teams.caller import Limits
from serving.teams.errors import TeamsError

if TYPE_CHECKING:
    from serving.teams.accounts import Accounts, Key, KeyGrant, NewKey, Team
    from serving.teams.database import Database

NONE: Final = "none"
_OPTIONS = {
    "requests_per_minute": "--rpm",
    "tokens_per_minute": "--tpm",
    "concurrent_requests": "--concurrent",
    "tokens_per_day": "--tokens-per-day",
    "tokens_per_month": "--tokens-per-month",
}

Name = Annotated[str, typer.Argument(help="of the team")]
KeyId = Annotated[str, typer.Argument(help="the 8 characters after msk_")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, for programs")]
Rpm = Annotated[str | None, typer.Option("--rpm", help=f"requests a minute, or {NONE}")]
Tpm = Annotated[str | None, typer.Option("--tpm", help=f"tokens a minute, or {NONE}")]
Concurrent = Annotated[
    str | None, typer.Option("--concurrent", help=f"requests at once, or {NONE}")
]
PerDay = Annotated[
    str | None, typer.Option("--tokens-per-day", help=f"tokens a day (UTC), or {NONE}")
]
PerMonth = Annotated[
    str | None, typer.Option("--tokens-per-month", help=f"tokens a month (UTC), or {NONE}")
]

keys_app = typer.Typer(no_args_is_help=True, help="Make, list, revoke and rotate API keys.")
teams_app = typer.Typer(no_args_is_help=True, help="Make, list and change teams.")
prices_app = typer.Typer(no_args_is_help=True, help="Set and list what tokens cost.")
db_app = typer.Typer(no_args_is_help=True, help="Look after the database of teams and usage.")


# --- keys --------------------------------------------------------------------------------


@keys_app.command("create")
def create_key(
    context: typer.Context,
    team: Annotated[str, typer.Option(help="whose key it is")],
    name: Annotated[str, typer.Option(help="what it is for")],
    expires: Annotated[str | None, typer.Option(help="how long it lasts, as in 90d")] = None,
    models: Annotated[str | None, typer.Option(help="ids, with commas; every model")] = None,
    scopes: Annotated[str, typer.Option(help="inference, admin or both")] = "inference",
    rpm: Rpm = None,
    tpm: Tpm = None,
    concurrent: Concurrent = None,
    tokens_per_day: PerDay = None,
    tokens_per_month: PerMonth = None,
) -> None:
    """Make a key and print it once: the key to stdout, what it is to stderr."""
    limits = _limits(rpm, tpm, concurrent, tokens_per_day, tokens_per_month)
    with _accounts(context) as accounts:
        grant = _grant(expires, models, scopes, limits)
        _show_once(accounts.create_key(team, name, grant))


@keys_app.command("list")
def list_keys(
    context: typer.Context,
    team: Annotated[str | None, typer.Option(help="only this team's")] = None,
    as_json: AsJson = False,
) -> None:
    """List keys, revoked and expired ones included; never the keys themselves."""
    with _accounts(context) as accounts:
        keys = accounts.list_keys(team)
    now = time.time()
    if as_json:
        _print_json(_key_as_json(key, now) for key in keys)
        return
    rows = (
        (
            key.id,
            key.team,
            key.name,
            key.state(now),
            ", ".join(sorted(key.scopes)),
            _models(key),
            _limits_text(key.limits),
            _day(key.expires),
        )
        for key in keys
    )
    _print_table(
        ("id", "team", "name", "state", "scopes", "models", "limits", "expires (UTC)"), rows
    )


@keys_app.command("revoke")
def revoke_key(context: typer.Context, key: KeyId) -> None:
    """End a key; gateways refuse it within seconds."""
    with _accounts(context) as accounts:
        revoked = accounts.revoke_key(key)
    _say(f"{revoked.id} ({revoked.name} of {revoked.team}) is revoked")


@keys_app.command("rotate")
def rotate_key(
    context: typer.Context,
    key: KeyId,
    overlap: Annotated[str, typer.Option(help="how long the old key stays valid")] = "24h",
) -> None:
    """Make a key that may what this one may, which stays valid for a while."""
    from serving.teams.accounts import parse_duration

    with _accounts(context) as accounts:
        _show_once(accounts.rotate_key(key, parse_duration("--overlap", overlap)))


def _grant(expires: str | None, models: str | None, scopes: str, limits: Limits) -> KeyGrant:
    from serving.teams.accounts import KeyGrant, parse_duration

    lasts = None if expires is None else parse_duration("--expires", expires)
    named = None if models is None else _split(models)
    with _told():
        return KeyGrant.model_validate(
            {"scopes": _split(scopes), "models": named, "limits": limits, "expires_in_s": lasts}
        )


def _show_once(new: NewKey) -> None:
    key = new.key
    print(new.text)
    errors.print(
        f"{key.id}: {key.name} of {key.team}, for {', '.join(sorted(key.scopes))}, "
        f"models: {_models(key)}, limits: {_limits_text(key.limits)}, "
        f"expires: {_day(key.expires)}. Keep it now: it cannot be shown again",
        soft_wrap=True,
        markup=False,
    )


def _models(key: Key) -> str:
    return "all" if key.models is None else ", ".join(sorted(key.models))


def _key_as_json(key: Key, now: float) -> dict[str, Any]:
    from serving.teams.accounts import described

    return {
        "id": key.id,
        **described(key),
        "created": key.created,
        "revoked_at": key.revoked_at,
        "replaced_by": key.replaced_by,
        "state": key.state(now),
    }


# --- teams -------------------------------------------------------------------------------


@teams_app.command("create")
def create_team(
    context: typer.Context,
    name: Name,
    priority: Annotated[Priority | None, typer.Option(help="instead of each request's own")] = None,
    rpm: Rpm = None,
    tpm: Tpm = None,
    concurrent: Concurrent = None,
    tokens_per_day: PerDay = None,
    tokens_per_month: PerMonth = None,
) -> None:
    """Make a team, without limits but for those given."""
    limits = _limits(rpm, tpm, concurrent, tokens_per_day, tokens_per_month)
    with _accounts(context) as accounts:
        team = accounts.create_team(name, priority, limits)
    _say_team(team)


@teams_app.command("list")
def list_teams(context: typer.Context, as_json: AsJson = False) -> None:
    """List teams with their limits."""
    with _accounts(context) as accounts:
        teams = accounts.list_teams()
    if as_json:
        _print_json(_team_as_json(team) for team in teams)
        return
    rows = ((team.name, team.priority or "", _limits_text(team.limits)) for team in teams)
    _print_table(("team", "priority", "limits"), rows)


@teams_app.command("set")
def set_team(
    context: typer.Context,
    name: Name,
    priority: Annotated[
        Literal["interactive", "batch", "none"] | None,
        typer.Option(help=f"{NONE} leaves it to each request"),
    ] = None,
    rpm: Rpm = None,
    tpm: Tpm = None,
    concurrent: Concurrent = None,
    tokens_per_day: PerDay = None,
    tokens_per_month: PerMonth = None,
) -> None:
    """Change what is given of a team, and leave the rest."""
    from serving.teams.accounts import TeamChange

    limits = _limits(rpm, tpm, concurrent, tokens_per_day, tokens_per_month)
    change = TeamChange(limits=limits)
    if priority is not None:
        change = TeamChange(limits=limits, priority=None if priority == NONE else priority)
    with _accounts(context) as accounts:
        team = accounts.change_team(name, change)
    _say_team(team)


def _say_team(team: Team) -> None:
    first = f", waited for as {team.priority}" if team.priority else ""
    _say(f"{team.name}: limits: {_limits_text(team.limits)}{first}")


def _team_as_json(team: Team) -> dict[str, Any]:
    return {
        "name": team.name,
        "priority": team.priority,
        "limits": team.limits.model_dump(exclude_none=True),
        "created": team.created,
    }


# --- prices ------------------------------------------------------------------------------


@prices_app.command("set")
def set_price(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="a model's id")],
    input_price: Annotated[float, typer.Option("--input", help="per million prompt tokens")],
    output_price: Annotated[float, typer.Option("--output", help="per million generated tokens")],
    cached_price: Annotated[
        float | None, typer.Option("--cached", help="per million cached prompt tokens; as --input")
    ] = None,
) -> None:
    """Set what a model's tokens cost from now on, in a currency of your own."""
    from serving.teams.accounts import Price

    cached = input_price if cached_price is None else cached_price
    with _told():
        price = Price(input=input_price, cached=cached, output=output_price)
    with _accounts(context) as accounts:
        accounts.set_price(model, price)
    _say(f"{model}: input {price.input:g}, cached {price.cached:g}, output {price.output:g}")


@prices_app.command("list")
def list_prices(context: typer.Context, as_json: AsJson = False) -> None:
    """List prices per million tokens."""
    with _accounts(context) as accounts:
        prices = accounts.list_prices()
    if as_json:
        _print_json({"model": model, **price.model_dump()} for model, price in prices.items())
        return
    rows = (
        (model, f"{price.input:g}", f"{price.cached:g}", f"{price.output:g}")
        for model, price in prices.items()
    )
    _print_table(("model", "input", "cached", "output"), rows)


# --- the database ------------------------------------------------------------------------


@db_app.command("upgrade")
def upgrade(context: typer.Context) -> None:
    """Bring the tables up to date; other processes that try it at the same time wait."""
    with _database(context) as database:
        applied = database.upgrade()
        done = f"applied {', '.join(applied)}" if applied else "up to date already"
        _say(f"{database.shown}: {done}")


@db_app.command("status")
def status(context: typer.Context) -> None:
    """Say whether the tables are up to date; ends with status 1 where they are not."""
    with _database(context) as database:
        state = database.migration_state()
        if state.up_to_date:
            _say(f"{database.shown}: up to date ({state.current})")
            return
        if state.newer:
            text = f"at {state.current}, which a newer moe-serving made; install that version"
        else:
            text = f"{', '.join(state.missing)} missing; run `moe-serving db upgrade`"
        _say(f"{database.shown}: {text}")
    raise typer.Exit(1)


# --- what they share -----------------------------------------------------------------------


@contextmanager
def _database(context: typer.Context) -> Iterator[Database]:
    """The database, closed after; a TeamsError ends the program with its text."""
    from serving.teams.database import database_url, open_database

    try:
        database = open_database(database_url(_home(context)))
        try:
            yield database
        finally:
            database.close()
    except TeamsError as error:
        fail(str(error))


@contextmanager
def _accounts(context: typer.Context) -> Iterator[Accounts]:
    from serving.teams.accounts import Accounts
    from serving.teams.keys import server_secret

    with _database(context) as database:
        database.prepare()
        yield Accounts(database, server_secret(_home(context)))


def _home(context: typer.Context) -> Path:
    home: Callable[[], Path] = context.obj
    return home()


@contextmanager
def _told() -> Iterator[None]:
    """A value that its option does not take ends the program, and is named."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        fail(f"--{first['loc'][0]}: found {str(first['input'])[:60]!r}; {_cure(first['msg'])}")


def _cure(message: str) -> str:
    return message[0].lower() + message[1:]


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _limits(*given: str | None) -> Limits:
    """Limits in the order of `_OPTIONS`; one that was not given is not set."""
    named = zip(_OPTIONS.items(), given, strict=True)
    return Limits(
        **{field: _limit(option, text) for (field, option), text in named if text is not None}
    )


def _limit(option: str, text: str) -> int | None:
    if text == NONE:
        return None
    # Fifteen digits are exact in every JSON reader.
    if not (text.isascii() and text.isdecimal() and len(text) <= 15 and int(text) > 0):
        fail(f"{option}: found {text[:40]!r}; write a whole number above 0, or {NONE}")
    return int(text)


def _limits_text(limits: Limits) -> str:
    set_ones: dict[str, int] = limits.model_dump(exclude_none=True)
    return ", ".join(f"{field.replace('_', ' ')} {set_ones[field]:,}" for field in set_ones) or NONE


def _day(at: float | None) -> str:
    return "never" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")


def _say(text: str) -> None:
    console.print(text, soft_wrap=True, markup=False)


def _print_json(rows: Iterable[dict[str, Any]]) -> None:
    print(json.dumps(list(rows), indent=2))


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(*columns, box=HORIZONTALS, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
