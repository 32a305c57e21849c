"""Lists of the admin API in parts, as OpenAI's clients page through them.

Owns how many items a reply has at most. Leaves the items to `admin_values`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from serving.teams.errors import UnknownNameError

MOST_ITEMS = 500
PageSize = Annotated[int, Field(ge=1, le=MOST_ITEMS)]
AFTER = "`last_id` of the part before"

Item = TypeVar("Item")
Shown = TypeVar("Shown")


class Page(BaseModel, Generic[Shown]):
    """Part of a list; `last_id` is the `after` of the next part."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    object: Literal["list"] = "list"
    data: list[Shown]
    last_id: str | None
    has_more: bool


class PageQuery(BaseModel):
    """Which part of a list; a misspelt parameter must not widen it."""

    # Not strict: all are text in a URL.
    model_config = ConfigDict(frozen=True, extra="forbid")

    limit: PageSize = 100
    after: Annotated[str, Field(max_length=400, description=AFTER)] = ""


def page(
    items: Sequence[Item],
    id_of: Callable[[Item], str],
    show: Callable[[Item], Shown],
    query: PageQuery,
) -> Page[Shown]:
    """The part of `items` that `query` asks for; raises UnknownNameError for its `after`."""
    start = 0
    if query.after:
        start = next((at for at, item in enumerate(items, 1) if id_of(item) == query.after), 0)
        if not start:
            raise UnknownNameError(
                f"after: found {query.after[:40]!r}; give the last_id of the part before"
            )
    return first_of(items[start : start + query.limit + 1], id_of, show, query.limit)


def first_of(
    items: Sequence[Item],
    id_of: Callable[[Item], str],
    show: Callable[[Item], Shown],
    limit: int,
) -> Page[Shown]:
    """A page of `items`, of which one more than `limit` tells that there are more."""
    data = items[:limit]
    last = id_of(data[-1]) if data else None
    return Page(data=[show(item) for item in data], last_id=last, has_more=len(items) > limit)
