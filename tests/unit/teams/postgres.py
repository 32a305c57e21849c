"""A PostgreSQL cluster for tests: in a temporary folder, on a Unix socket, ended after.

PostgreSQL refuses to run as root, so that root starts it as another user.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

_DEBIAN = Path("/usr/lib/postgresql")
# A throw-away cluster has nothing to lose in a power cut.
_SETTINGS = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "listen_addresses=")


def programs() -> Path | None:
    """The folder of `initdb` and `pg_ctl`, on PATH or from Debian's package; None without one."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    versions = [path for path in _DEBIAN.glob("*/bin") if (path / "initdb").exists()]
    return max(versions, key=lambda path: int(path.parent.name), default=None)


class Cluster:
    """A running cluster, which the user `teams` may use without a password."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://teams@/{database}?host={self._folder}"

    @contextmanager
    def database(self) -> Iterator[str]:
        """The URL of a new, empty database, which goes when the block ends."""
        name = f"t{secrets.token_hex(8)}"
        self._run(f'CREATE DATABASE "{name}"')
        try:
            yield self.url(name)
        finally:
            self._run(f'DROP DATABASE "{name}" WITH (FORCE)')

    def _run(self, statement: str) -> None:
        place = f"host={self._folder} user=teams dbname=postgres"
        with psycopg.connect(place, autocommit=True) as connection:
            connection.execute(statement.encode())


@contextmanager
def running_cluster(bin_folder: Path) -> Iterator[Cluster]:
    """A cluster while the block runs."""
    # Not pytest's own folder: that is root's alone, and a socket's path has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    user = _other_user() if os.geteuid() == 0 else None
    if user is not None:
        os.chown(folder, user.pw_uid, user.pw_gid)
    data = str(folder / "data")

    def run(*arguments: str) -> None:
        subprocess.run(
            [str(bin_folder / arguments[0]), *arguments[1:]],
            user=None if user is None else user.pw_uid,
            group=None if user is None else user.pw_gid,
            extra_groups=None if user is None else [],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            check=True,
        )

    options = " ".join(
        f"-c {setting}" for setting in (*_SETTINGS, f"unix_socket_directories={folder}")
    )
    try:
        run("initdb", "-D", data, "-U", "teams", "-A", "trust", "-N", "-E", "UTF8", "--locale=C")
        run("pg_ctl", "-D", data, "-w", "-l", str(folder / "log"), "-o", options, "start")
        try:
            yield Cluster(folder)
        finally:
            run("pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


def _other_user() -> pwd.struct_passwd:
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    return names.get("postgres") or names["nobody"]
