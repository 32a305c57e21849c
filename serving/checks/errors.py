"""The checks' one error type.

Owns nothing but the type. A `CatalogError`, so that whoever handles a stack file
that cannot be read handles a target that cannot be read as well.
"""

from __future__ import annotations

from serving.catalog.errors import CatalogError


class CheckError(CatalogError):
    """A target cannot be checked at all; the text names it, what was found and the cure."""

    def __init__(self, message: str, *, code: str = "check") -> None:
        super().__init__(message, code=code)
