"""The processes of a running stack, from outside: who is who, and what their counters say.

Owns finding them by the stack's mark and their titles, the name Serve gives a replica, and
reading `/metrics` of engines and gateways at their own ports: behind HAProxy one gateway
answers for all. Leaves what is done to them to `faults`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from serving.engines.keys import ENGINE_KEY_HEADER
from serving.processes import marked
from serving.stack.environment import MARK

REPLICA = "ray::ServeReplica:"
GATEWAY = f"{REPLICA}gateway:"
ENGINE = f"{REPLICA}engine-"
CONTROLLER = "ray::ServeController"
ANSWERS_WITHIN_S = 3.0
# Ray's log of a worker process names the actor in every line.
_ACTOR = re.compile(rb"SERVE_REPLICA::[^#\"]+#[^#\"]+#(\w+)")
_LABELS = re.compile(r'(\w+)="([^"]*)"')
# Answers that an engine gave to their end, as vLLM's `finished_reason` has it.
FINISHED = ("stop", "length", "repetition")


class NoStackError(RuntimeError):
    """There is no running stack in the state folder."""


@dataclass(frozen=True, slots=True)
class Replica:
    """An engine replica that takes requests."""

    process: psutil.Process
    application: str
    name: str
    """As Serve names it, and the header `x-moe-serving-replica`; empty where not known."""
    url: str

    @property
    def core(self) -> psutil.Process | None:
        """vLLM's engine core."""
        with contextlib.suppress(psutil.Error):
            for child in self.process.children(recursive=True):
                if "EngineCore" in title(child):
                    return child
        return None


@dataclass(frozen=True, slots=True)
class Parts:
    """How many processes of each kind there are to be."""

    engines: dict[str, int]
    """By application."""
    gateways: int


class StackProcesses:
    """What runs of the stack whose state folder is `home`; raises NoStackError."""

    def __init__(self, home: Path) -> None:
        self._home = home.resolve()
        try:
            run = json.loads((self._home / "run.json").read_text(encoding="utf-8"))
            self._key = (self._home / "engine.key").read_text(encoding="ascii").split()[0]
        except (OSError, ValueError, IndexError) as error:
            raise NoStackError(
                f"{home} holds no running stack ({error}); start one with `moe-serving up`"
            ) from None
        self._logs = Path(run["temp"]) / "session_latest" / "logs"
        self._urls: dict[int, str] = {}
        self._names: dict[int, str] = {}

    def all(self) -> list[psutil.Process]:
        """Every living process of the stack."""
        return marked(MARK, str(self._home))

    def parts(self) -> Parts:
        """What runs now, whether it answers or not."""
        titles = [title(process) for process in self.all()]
        engines = Counter(_application(each) for each in titles if each.startswith(ENGINE))
        gateways = sum(each.startswith(GATEWAY) for each in titles)
        return Parts(dict(engines), gateways)

    def engines(self) -> list[Replica]:
        """The engine replicas that answer, in the order of their applications and starts."""
        found = []
        for process in self._titled(ENGINE):
            if url := self._answering(process, "vllm:"):
                replica = Replica(
                    process, _application(title(process)), self._name(process.pid), url
                )
                found.append(replica)
        return sorted(found, key=lambda each: (each.application, each.process.pid))

    def gateways(self) -> list[psutil.Process]:
        """The gateway processes that answer."""
        found = self._titled(GATEWAY)
        return [each for each in found if self._answering(each, "moe_serving_")]

    def controllers(self) -> list[psutil.Process]:
        """Serve's controller."""
        return self._titled(CONTROLLER)

    def proxies(self) -> list[psutil.Process]:
        """HAProxy's own processes."""
        found = []
        for process in self.all():
            with contextlib.suppress(psutil.Error):
                if process.name() == "haproxy":
                    found.append(process)
        return found

    def gateway_metrics(self) -> dict[int, str]:
        """What each gateway process that answers counts, by its id."""
        found = {}
        for process in self._titled(GATEWAY):
            if url := self._answering(process, "moe_serving_"):
                found[process.pid] = self._metrics(url) or ""
        return found

    def engine_metrics(self, replica: Replica) -> str:
        """What an engine counts; empty where it does not answer."""
        return self._metrics(replica.url) or ""

    def _titled(self, start: str) -> list[psutil.Process]:
        return [process for process in self.all() if title(process).startswith(start)]

    def _answering(self, process: psutil.Process, metric: str) -> str | None:
        """The address at which the process tells metrics whose names begin so."""
        known = self._urls.get(process.pid)
        for url in [known] if known else list(_listening(process)):
            text = self._metrics(url)
            if text is not None and metric in text:
                self._urls[process.pid] = url
                return url
        return None

    def _metrics(self, url: str) -> str | None:
        headers = {ENGINE_KEY_HEADER: self._key}
        with contextlib.suppress(httpx.HTTPError):
            reply = httpx.get(
                f"{url}/metrics", headers=headers, timeout=ANSWERS_WITHIN_S, trust_env=False
            )
            if reply.status_code == httpx.codes.OK:
                return reply.text
        return None

    def _name(self, pid: int) -> str:
        files = [] if pid in self._names else sorted(self._logs.glob(f"worker-*-{pid}.*"))
        for file in files:
            with contextlib.suppress(OSError):
                if found := _ACTOR.search(file.read_bytes()):
                    self._names[pid] = found[1].decode()
        return self._names.get(pid, "")


def title(process: psutil.Process) -> str:
    """The command line, or the title that the process gave itself; empty where it is gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def ended(process: psutil.Process) -> bool:
    """Whether it does nothing any more; its parent may not have looked yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def total(exposition: str, name: str, **labels: str) -> float:
    """The sum of the samples of this name that carry these labels; 0 where there are none."""
    found = 0.0
    for line in exposition.splitlines():
        series, _, value = line.rpartition(" ")
        at, _, rest = series.partition("{")
        if at == name and labels.items() <= dict(_LABELS.findall(rest)).items():
            found += float(value)
    return found


def finished_requests(exposition: str) -> float:
    """Requests that an engine has answered to their end."""
    return sum(
        total(exposition, "vllm:request_success_total", finished_reason=reason)
        for reason in FINISHED
    )


def _application(text: str) -> str:
    return text.removeprefix(REPLICA).partition(":")[0]


def _listening(process: psutil.Process) -> Iterator[str]:
    """Addresses on which a process may speak HTTP; Ray's own ports listen on every IPv6 one."""
    with contextlib.suppress(psutil.Error):
        for connection in process.net_connections("tcp"):
            address = connection.laddr
            if connection.status == psutil.CONN_LISTEN and address.ip != "::":
                host = f"[{address.ip}]" if ":" in address.ip else address.ip
                yield f"http://{host}:{address.port}"
