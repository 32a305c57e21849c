"""What this room refuses: one type, and a kind of it for each answer a client can get.

Leaves status codes and OpenAI's shape to the gateway.
"""

from __future__ import annotations


class TeamsError(ValueError):
    """A key, a team, a limit or the store cannot be used so; the text says why and the cure.

    The text never holds a key, a secret or a password.
    """


class StoreError(TeamsError):
    """The database cannot be reached, or is not the one this program needs."""


class UnknownNameError(TeamsError):
    """There is no team or key of this name."""


class UnauthorizedError(TeamsError):
    """No usable key came with the request (401); the text is always the same."""


class ForbiddenError(TeamsError):
    """The key is good, but not for this (403)."""


class KeysUnavailableError(TeamsError):
    """The keys could not be read from the database yet (503)."""
