"""Whose CPU time is whose: the processes of one server, by kind.

Owns finding a server's processes by a mark in their environment, telling their
kinds apart, reading their CPU time and ending them. Leaves starting to `servers`.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum

import psutil

from serving.processes import marked

MARK = "MOE_SERVING_STUDY"
TERMINATE_WITHIN_S = 20.0
KILL_WITHIN_S = 5.0


class Kind(StrEnum):
    """What a process of a server is for."""

    ENGINE_CORE = "engine core"
    API_SERVER = "API server"
    ENGINE_REPLICA = "engine replica"
    GATEWAY = "gateway"
    INGRESS = "ingress"
    ROUTER = "router"
    PROXY = "proxy"
    CONTROLLER = "controller"
    RAY = "Ray"
    OTHER = "other"


# Every token, or every request, passes through these; Ray's own processes only look on.
REQUEST_PATH = frozenset(
    {
        Kind.API_SERVER,
        Kind.ENGINE_REPLICA,
        Kind.GATEWAY,
        Kind.INGRESS,
        Kind.ROUTER,
        Kind.PROXY,
    }
)

# The first that occurs in the command line decides; a replica's title names its deployment.
_SIGNS: tuple[tuple[str, Kind], ...] = (
    ("VLLM::", Kind.ENGINE_CORE),
    ("multiprocessing.spawn", Kind.ENGINE_CORE),
    ("multiprocessing.forkserver", Kind.ENGINE_CORE),
    ("ray::ServeController", Kind.CONTROLLER),
    ("ray::HAProxyManager", Kind.PROXY),
    ("ray::ProxyActor", Kind.PROXY),
    (":LLMRouter", Kind.ROUTER),
    (":Gateway", Kind.GATEWAY),
    ("Ingress", Kind.INGRESS),
    ("ray::ServeReplica", Kind.ENGINE_REPLICA),
    ("vllm.entrypoints.openai.api_server", Kind.API_SERVER),
)
_RAY_PROGRAMS = ("raylet", "gcs_server", "ray::", "/ray/", "serving.studies.overhead.ray_llm")


def classify(command: Sequence[str]) -> Kind:
    """The kind of a process, from its command line or the title it gave itself."""
    line = " ".join(command)
    program = os.path.basename(command[0].split(" ")[0]) if command else ""
    if program.startswith("haproxy"):
        return Kind.PROXY
    for sign, kind in _SIGNS:
        if sign in line:
            return kind
    if any(name in line for name in _RAY_PROGRAMS):
        return Kind.RAY
    return Kind.OTHER


def find(mark: str) -> list[psutil.Process]:
    """Every living process whose environment carries `mark`, and all their descendants."""
    found = set(marked(MARK, mark))
    for process in tuple(found):
        with contextlib.suppress(psutil.Error):
            found.update(process.children(recursive=True))
    return sorted(found, key=lambda process: process.pid)


def cpu_seconds(processes: Iterable[psutil.Process]) -> dict[Kind, float]:
    """User and system CPU seconds so far, summed by kind; processes that ended are left out."""
    total: Counter[Kind] = Counter()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total[classify(process.cmdline())] += times.user + times.system
    return dict(total)


def spent(before: Mapping[Kind, float], after: Mapping[Kind, float]) -> dict[Kind, float]:
    """CPU seconds between two readings of `cpu_seconds`, by kind."""
    return {kind: after[kind] - before.get(kind, 0.0) for kind in after}


def end(processes: Collection[psutil.Process]) -> None:
    """Ask the processes to end, then make them; returns when they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.resume()
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=TERMINATE_WITHIN_S)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=KILL_WITHIN_S)
