"""A key as a client sends it: how it is made, its form, and what of it is stored.

A key is 256 random bits behind a readable id. Only its HMAC-SHA-256 under the server's secret is
stored: fast enough for every request, and of no use to who has the database alone. Leaves
accounts to `accounts`, and requests to `authenticate`.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
import tempfile
from pathlib import Path

from serving.teams.errors import TeamsError

SECRET_FILE_VARIABLE = "MOE_SERVING_KEY_SECRET_FILE"
# Without what is misread: i, l, o, 0 and 1.
_ID_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"
_ID_LENGTH = 8
_SECRET_BYTES = 32
_PREFIX = "msk_"
_KEY = re.compile(rb"msk_[a-hjkmnp-z2-9]{8}_[A-Za-z0-9_-]{43}")
KEY_LENGTH = 56


def mint() -> str:
    """A new key: `msk_`, 8 characters of id, `_` and 256 random bits in base64url."""
    key_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))
    return f"{_PREFIX}{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"


def id_of(key: str) -> str:
    """The readable part of a key that was just made, by which it is listed."""
    return key[len(_PREFIX) :][:_ID_LENGTH]


def well_formed(offered: bytes) -> bool:
    """Whether this can be a key; looks at no more than a key's length of it."""
    return len(offered) == KEY_LENGTH and _KEY.fullmatch(offered) is not None


def digest(secret: bytes, key: bytes) -> bytes:
    """What is stored of a key: 32 bytes."""
    return hmac.digest(secret, key, "sha256")


def server_secret(home: Path) -> bytes:
    """The secret that digests are made under.

    From the file in MOE_SERVING_KEY_SECRET_FILE, which has to be there, so that all machines of a
    cluster use one; else from `keys.secret` in the folder `home`, made at first use. Raises
    TeamsError, whose text names the file and no content.
    """
    if given := os.environ.get(SECRET_FILE_VARIABLE):
        return _read(Path(given), SECRET_FILE_VARIABLE)
    path = home / "keys.secret"
    try:
        _make(path)
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise TeamsError(f"{path}: others may read it; run chmod 600 {path}")
    except OSError as error:
        raise _unusable(path, error) from None
    return _read(path, "the server's secret")


def _make(path: Path) -> None:
    """Write a new secret, whole or not at all, unless one is there."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".keys-") as file:
        file.write(secrets.token_urlsafe(_SECRET_BYTES) + "\n")
        file.flush()
        os.fsync(file.fileno())
        try:
            # Where another process was first, its secret stays.
            os.link(file.name, path)
        except FileExistsError:
            return


def _read(path: Path, name: str) -> bytes:
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise _unusable(path, error) from None
    if len(secret) < _SECRET_BYTES:
        raise TeamsError(
            f"{name}: {path} holds {len(secret)} bytes; write {_SECRET_BYTES} random ones or more, "
            "as `openssl rand -hex 32` prints"
        )
    return secret


def _unusable(path: Path, error: OSError) -> TeamsError:
    reason = (error.strerror or str(error)).lower()
    return TeamsError(
        f"{path}: cannot be used ({reason}); correct it, or name another file "
        f"in {SECRET_FILE_VARIABLE}"
    )
