"""The planner's one error type.

Owns nothing but the type. A `CatalogError`, so that whoever handles a name the
catalogue does not have handles a plan that cannot be made as well.
"""

from __future__ import annotations

from serving.catalog.errors import CatalogError


class PlannerError(CatalogError):
    """A plan cannot be made; the text names the field, what was found and the cure."""

    def __init__(self, message: str, *, code: str = "plan") -> None:
        super().__init__(message, code=code)
