"""The processes of one stack on this machine, and the folder that remembers them.

Owns the state folder (key file, log, what runs), Ray's own start, and finding and
ending processes. Every process of a stack inherits a mark in its environment, so
that all of its own are found, HAProxy and vLLM workers included, and nobody
else's are touched. Leaves Serve's applications to `driver` and the order of
things to `lifecycle`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

import psutil

from serving import processes
from serving.engines.keys import make_key_file
from serving.stack.environment import MARK, free_port, ray_environment, ray_token
from serving.stack.spec import StackSpec

HOME_VARIABLE = "MOE_SERVING_HOME"
# Ray answers SIGTERM in under a second; what has not gone by then hangs.
TERMINATE_WITHIN_S = 5.0
KILL_WITHIN_S = 5.0
# A process may start another one while it is being ended.
KILL_ROUNDS = 5


class RuntimeFailure(RuntimeError):
    """The stack cannot be started, reached or changed; the text says why and the cure."""


class Run(TypedDict):
    """What is noted of the stack that runs or starts, in `run.json`."""

    stack: str
    address: str
    """Ray's, host:port."""
    url: str
    """The gateway's, without trailing slash."""
    temp: str
    started: float
    """Unix time."""
    port_option: int | None
    """--port of `up`; it holds for updates too."""
    ray_up: bool
    ready: bool
    stopping: bool
    environment: dict[str, str]
    """What every process of the stack inherits; no secrets."""


def home() -> Path:
    """The state folder: MOE_SERVING_HOME, else the user's state directory."""
    if value := os.environ.get(HOME_VARIABLE):
        return Path(value).resolve()
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "moe-serving"


def log_file() -> Path:
    """Where Ray's, Serve's and vLLM's own lines go; started anew by every `up` from nothing."""
    return home() / "up.log"


def url_of(stack: StackSpec) -> str:
    """The address to try from this machine, without trailing slash."""
    gateway = stack.gateway
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(gateway.host, gateway.host)
    return f"{'https' if gateway.tls else 'http'}://{host}:{gateway.port}"


# --- what runs ---------------------------------------------------------------------------


def running() -> Run | None:
    """What is noted of the stack of this state folder, or None."""
    try:
        run: Run = json.loads((home() / "run.json").read_text())
    except (OSError, ValueError):
        return None
    # Another version's note cannot be acted on; `down` still ends what it left by the mark.
    return run if run.keys() == Run.__annotations__.keys() else None


def note(run: Run) -> None:
    """Write `run.json`, whole or not at all."""
    write_file(home() / "run.json", json.dumps(run))


def write_file(path: Path, text: str) -> None:
    """Replace the file at once, readable by its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Hold the state folder against a second `up`; raises RuntimeFailure where one is at work."""
    home().mkdir(parents=True, exist_ok=True, mode=0o700)
    with (home() / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RuntimeFailure(
                "another moe-serving up is starting or changing this stack; wait until it is done, "
                "or end the stack with `moe-serving down`"
            ) from None
        yield


def own_processes() -> list[psutil.Process]:
    """Every living process that a stack of this state folder started."""
    return processes.marked(MARK, str(home()))


def ray_answers(run: Run) -> bool:
    """Whether something listens at the address of this stack's Ray."""
    host, _, port = run["address"].rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2):
            return True
    except OSError:
        return False


# --- ports -------------------------------------------------------------------------------


def port_problem(host: str, port: int) -> str | None:
    """Why the stack cannot listen on this address, who is in the way, and the cure; else None."""
    error = _listen_error(host, port)
    if error is None:
        return None
    if error.errno == errno.EADDRINUSE:
        return (
            f"gateway.port: {port} is taken by {_listener(port)}; end it, "
            "or choose another port with --port"
        )
    if error.errno == errno.EACCES:
        return f"gateway.port: {port} needs more rights than you have; choose one above 1023"
    return f"gateway.host: {host} cannot be listened on ({error.strerror or error}); correct it"


def _listen_error(host: str, port: int) -> OSError | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None


def _listener(port: int) -> str:
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status != psutil.CONN_LISTEN or connection.laddr.port != port:
            continue
        with contextlib.suppress(psutil.Error, TypeError):
            return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return "a process that this user cannot see"


# --- starting and ending -----------------------------------------------------------------


def prepare(stack: StackSpec, port_option: int | None) -> Run:
    """Make the state folder, the engine key and the environment for a new run."""
    folder = home()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    make_key_file(folder / "engine.key")
    log_file().write_text("")
    # Ray's sockets live below this folder, and a socket's path has at most 107 bytes.
    temp = Path(tempfile.mkdtemp(prefix="ms-", dir="/tmp"))
    run = Run(
        stack=stack.name,
        address=f"127.0.0.1:{free_port()}",
        url=url_of(stack),
        temp=str(temp),
        started=time.time(),
        port_option=port_option,
        ray_up=False,
        ready=False,
        stopping=False,
        environment=ray_environment(folder, temp, stack.gateway.tls)
        | ray_token(folder / "ray.token"),
    )
    note(run)
    return run


def start_ray(run: Run) -> None:
    """Start a Ray head; raises RuntimeFailure with Ray's own last lines.

    For 127.0.0.1 Ray 2.60 takes the machine's first address, so that nodes can join: what guards
    its ports is the token.
    """
    command = [
        str(Path(sys.executable).parent / "ray"),
        "start",
        "--head",
        "--node-ip-address=127.0.0.1",
        f"--port={run['address'].rpartition(':')[2]}",
        f"--temp-dir={run['temp']}",
        "--include-dashboard=false",
        "--disable-usage-stats",
    ]
    with log_file().open("a") as log:
        # A session of its own: Ctrl-C in the terminal is for `up` alone, which ends Ray in order.
        result = subprocess.run(
            command,
            env=environment_of(run),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            check=False,
        )
    if result.returncode != 0:
        raise RuntimeFailure(f"Ray did not start:\n{last_lines(log_file(), 8)}")


def environment_of(run: Run) -> dict[str, str]:
    """This process's environment with the stack's own over it."""
    return {**os.environ, **run["environment"]}


def last_lines(path: Path, count: int, limit: int = 4000) -> str:
    """The end of a text file: at most `count` lines and `limit` characters."""
    with contextlib.suppress(OSError):
        text = path.read_bytes()[-limit:].decode(errors="replace")
        return "\n".join(text.rstrip().splitlines()[-count:])
    return ""


def shared_memory() -> frozenset[Path]:
    """Shared memory that own processes have mapped now."""
    return processes.shared_memory(own_processes())


def drop_shared_memory(before: frozenset[Path]) -> None:
    """Free what `shared_memory` found and nobody of ours uses any more.

    Some 400 MB for each engine; a vLLM that is ended from outside leaves it
    behind, and it would stay until the machine restarts.
    """
    for path in before - shared_memory():
        with contextlib.suppress(OSError):
            path.unlink()


def mark_stopping() -> None:
    """Tell every `up` of this stack that it is being ended on purpose."""
    if run := running():
        run["stopping"] = True
        note(run)


def end_processes() -> int:
    """End what is left of this state folder's stack, and forget it; returns how many there were."""
    living = own_processes()
    for process in living:
        _signal(process, kill=False)
    psutil.wait_procs(living, timeout=TERMINATE_WITHIN_S)
    for _ in range(KILL_ROUNDS):
        left = own_processes()
        if not left:
            break
        for process in left:
            _signal(process, kill=True)
        psutil.wait_procs(left, timeout=KILL_WITHIN_S)
    if run := running():
        shutil.rmtree(run["temp"], ignore_errors=True)
    (home() / "run.json").unlink(missing_ok=True)
    return len(living)


def describe(processes: list[psutil.Process]) -> str:
    """Names and process ids, at most five, for a message."""
    parts: list[str] = []
    for process in processes[:5]:
        with contextlib.suppress(psutil.Error):
            parts.append(f"{process.name()} {process.pid}")
    more = len(processes) - 5
    return ", ".join(parts) + (f" and {more} more" if more > 0 else "")


def _signal(process: psutil.Process, *, kill: bool) -> None:
    with contextlib.suppress(psutil.Error):
        process.kill() if kill else process.terminate()
