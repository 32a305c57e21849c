"""What the commands print with, and how each of them ends when a user can help it."""

from __future__ import annotations

import sys
from typing import NoReturn

from rich.console import Console

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


def fail(message: str) -> NoReturn:
    """Print an error and end the program with status 2."""
    errors.print("[red]error:[/red]", end=" ")
    # As it is: what a user or an engine wrote may hold square brackets.
    errors.print(message, soft_wrap=True, markup=False)
    sys.exit(2)
