"""The Ray cluster of one stack on this machine: start it, find it, end it.

Owns the state folder (key file, what runs) and the processes. Every process of
a stack inherits a mark in its environment, so that `down` finds all of its own,
HAProxy and vLLM workers included, and touches nobody else's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from serving.engines.keys import make_key_file
from serving.stack.environment import MARK, free_port, ray_environment

HOME_VARIABLE = "MOE_SERVING_HOME"
STOP_WITHIN_S = 10.0


class RuntimeFailure(RuntimeError):
    """The stack's Ray cannot be started or reached."""


def home() -> Path:
    """The state folder: MOE_SERVING_HOME, else the user's state directory."""
    if value := os.environ.get(HOME_VARIABLE):
        return Path(value).resolve()
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "moe-serving"


def own_processes() -> list[psutil.Process]:
    """Every living process that a stack of this state folder started."""
    mark = str(home())
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def port_is_free(host: str, port: int) -> bool:
    """Whether the stack could listen on this address now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def start_ray(name: str) -> str:
    """Start a Ray head on loopback for the stack `name` and return its address.

    Raises RuntimeFailure with Ray's own last lines.
    """
    folder = home()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    make_key_file(folder / "engine.key")
    # Ray's sockets live below this folder, and a socket's path has at most 107 bytes.
    temp = Path(f"/tmp/ms-{os.getpid()}")
    port = free_port()
    environment = ray_environment(folder, temp)
    os.environ.update(environment)
    command = [
        str(Path(sys.executable).parent / "ray"),
        "start",
        "--head",
        "--node-ip-address=127.0.0.1",
        f"--port={port}",
        f"--temp-dir={temp}",
        "--include-dashboard=false",
        "--disable-usage-stats",
    ]
    result = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise RuntimeFailure(f"Ray did not start:\n{(result.stderr or result.stdout)[-2000:]}")
    address = f"127.0.0.1:{port}"
    state = {"address": address, "stack": name, "temp": str(temp), "started": time.time()}
    (folder / "run.json").write_text(json.dumps(state))
    return address


def running() -> Mapping[str, str] | None:
    """What `start_ray` noted of the stack that runs, or None."""
    try:
        state: dict[str, str] = json.loads((home() / "run.json").read_text())
    except (OSError, ValueError):
        return None
    return state


def stop() -> int:
    """End every process of this state folder's stack; returns how many there were."""
    processes = own_processes()
    for process in processes:
        _signal(process, kill=False)
    _, alive = psutil.wait_procs(processes, timeout=STOP_WITHIN_S)
    for process in [*alive, *own_processes()]:
        _signal(process, kill=True)
    psutil.wait_procs(alive, timeout=STOP_WITHIN_S)
    state = running()
    if state:
        shutil.rmtree(state["temp"], ignore_errors=True)
    (home() / "run.json").unlink(missing_ok=True)
    return len(processes)


def _signal(process: psutil.Process, *, kill: bool) -> None:
    with contextlib.suppress(psutil.Error):
        process.kill() if kill else process.terminate()
