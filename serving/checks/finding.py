"""What a rule is and what it finds.

Owns the two forms and the decorator that makes a function a rule. Leaves what each
rule looks for to `rules`, and which of them are asked to `run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from serving.checks.versions import ANY, Range, show

# The state of the threads is that of the copies read, the newest of October 2026.
OPEN = "open (October 2026)"
BY_DESIGN = "by design"

# Takes the Facts of one engine, or those of all engines of a stack. Yields a text for each
# case: what was found, and where.
Look = Callable[..., Iterable[str]]


class Severity(IntEnum):
    """How bad a finding is; the greater the worse."""

    NOTE = 0
    """Good to know; changes no exit status."""
    WARNING = 1
    """It runs, but not well, or not for everyone."""
    ERROR = 2
    """It does not start, crashes or answers wrongly; `up` refuses it."""

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that goes wrong, and the function that looks for it."""

    code: str
    """Stable: a code that is withdrawn is never used again."""
    title: str
    severity: Severity
    effect: str
    """What it does to the user."""
    cure: str
    versions: Range
    thread: str
    """Where it was reported, as owner/repository#number, or the document's name."""
    status: str
    whole_stack: bool
    """Whether `look` takes the engines of a stack at once instead of one."""
    look: Look = field(repr=False)

    @property
    def state(self) -> str:
        """Whether the thread is fixed, and since which version."""
        engine, before = self.versions.engine, self.versions.before
        if self.status != OPEN or engine is None or before is None:
            return self.status
        return f"fixed in {show(engine, before)}"


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that fired."""

    rule: Rule
    subject: str
    """The engine or the checkpoint it is about."""
    found: str

    def __str__(self) -> str:
        """In one paragraph: code, whom it is about, what was found, the effect and the cure."""
        rule = self.rule
        return f"{rule.code} {self.subject}: {rule.title}: {self.found}. {rule.effect} {rule.cure}"

    @property
    def order(self) -> tuple[int, str, str]:
        """Most severe first, then by code."""
        return (-self.rule.severity, self.rule.code, self.subject)


def rule(
    code: str,
    title: str,
    severity: Severity,
    *,
    effect: str,
    cure: str,
    thread: str,
    versions: Range = ANY,
    status: str = OPEN,
    whole_stack: bool = False,
) -> Callable[[Look], Rule]:
    """Make the decorated function a rule."""

    def made(look: Look) -> Rule:
        return Rule(
            code=code,
            title=title,
            severity=severity,
            effect=effect,
            cure=cure,
            versions=versions,
            thread=thread,
            status=status,
            whole_stack=whole_stack,
            look=look,
        )

    return made
