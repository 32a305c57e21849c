"""Errors of the catalogue and of every YAML file the project reads.

Owns the wording shared by all of them: where, what was found, the cure. Leaves
finding the problems to the loaders and to the validators of each file's model.
"""

from __future__ import annotations

from dataclasses import dataclass


class CatalogError(Exception):
    """Something asked of the catalogue is not there or does not fit.

    `code` is a short stable word for programs; the text is for people and ends
    with the cure.
    """

    def __init__(self, message: str, *, code: str = "catalog") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault in a file: `file:line: field.path: what was found; cure`.

    `line` counts from 1; 0 for a fault of the file as a whole.
    """

    file: str
    line: int
    field: str
    text: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " if self.line else f"{self.file}: "
        return f"{where}{self.field}: {self.text}" if self.field else where + self.text


class ConfigError(CatalogError):
    """A configuration file cannot be used; the text has one line per problem."""

    def __init__(self, problems: tuple[Problem, ...], *, code: str = "config") -> None:
        super().__init__("\n".join(str(problem) for problem in problems), code=code)
        self.problems = problems


class FieldError(ValueError):
    """Raised by a model's validator about a field further down than the model.

    `path` leads from the validated model to the field, so that the report names
    that field's line and not only the block it stands in.
    """

    def __init__(self, message: str, *path: str | int) -> None:
        super().__init__(message)
        self.path = path
