"""The clients' port, held open by a process that does nothing else.

HAProxy accepts from a listening socket that it shares with the holder. When HAProxy is killed,
the socket stays: who connects waits in its queue until the next HAProxy, instead of being
refused. The holder gives the socket to whoever may open its place in the file system, and ends
some time after the last HAProxy that took it.

It is started by `haproxy`, as a process of its own; this module imports nothing that takes long.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

BACKLOG = 4096
LOOK_EVERY_S = 5.0
# Serve takes 4 to 10 s to notice that HAProxy has died and to start another.
UNUSED_FOR_S = 30.0


def take(place: Path) -> int | None:
    """The file descriptor of the socket whose holder is at `place`; None where there is none."""
    with socket.socket(socket.AF_UNIX) as holder:
        try:
            holder.connect(str(place))
            _, descriptors, _, _ = socket.recv_fds(holder, 1, 1)
        except OSError:
            return None
    return descriptors[0] if descriptors else None


def listen(address: str, place: Path) -> int:
    """Listen at `address`, `host:port`, and start the holder; the socket's file descriptor.

    Raises OSError where that address cannot be had.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    listener = socket.create_server(
        ("" if host == "*" else host, int(port)),
        family=socket.AF_INET6 if ":" in host else socket.AF_INET,
        backlog=BACKLOG,
        dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
    )
    place.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place))
        place.chmod(0o600)
        server.listen()
        numbers = (listener.fileno(), server.fileno(), os.getpid())
        subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, numbers)],
            pass_fds=(listener.fileno(), server.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    return listener.detach()


def hold(listener: int, server: socket.socket, user: int) -> None:
    """Give the descriptor `listener` to all who ask `server`, until no user of it is left.

    `user` is the process id of the first.
    """
    users, used_at = {user}, time.monotonic()
    server.settimeout(LOOK_EVERY_S)
    while time.monotonic() < used_at + UNUSED_FOR_S:
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            with connection:
                socket.send_fds(connection, [b"0"], [listener])
                users.add(_peer(connection))
        users = {pid for pid in users if Path(f"/proc/{pid}").exists()}
        if users:
            used_at = time.monotonic()


def _peer(connection: socket.socket) -> int:
    """The process id at the other end."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


if __name__ == "__main__":
    _listener, _server, _user = map(int, sys.argv[1:])
    hold(_listener, socket.socket(fileno=_server), _user)
