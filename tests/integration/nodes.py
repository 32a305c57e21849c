"""A second machine for a stack: a network namespace of its own, with a Ray node in it.

Owns the namespace, the cable to it, Ray's node there and the ways to lose it, and clients that
note when each of their streams began and how it ended. Files, memory and cores are this machine's.
Leaves what must hold to the tests.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from serving import processes
from serving.stack import runtime
from tests.integration.harness import PROMPT

CORES = os.cpu_count() or 1
# Inherited by every process of the node, as the stack's own mark is.
_MARK = "MOE_SERVING_TEST_NODE"
_HARDWARE_ADDRESS = "02:00:00:00:00:02"


class Node:
    """The second machine; it has an address, and Ray once it has joined."""

    def __init__(self) -> None:
        self.name = f"ms-{os.getpid()}"
        # 198.18.0.0/15 is set aside for tests of networks (RFC 2544).
        self._network = f"198.18.{os.getpid() % 256}"
        self.address = f"{self._network}.2"

    @contextlib.contextmanager
    def plugged_in(self) -> Iterator[Node]:
        """The machine with its cable, until the end of the block."""
        _ip(f"netns add {self.name}")
        try:
            _ip(f"link add {self.name} type veth peer name eth0 netns {self.name}")
            _ip(f"addr add {self._network}.1/30 dev {self.name}")
            _ip(f"link set {self.name} up")
            _ip(f"-n {self.name} link set lo up")
            _ip(f"-n {self.name} link set eth0 address {_HARDWARE_ADDRESS}")
            _ip(f"-n {self.name} addr add {self.address}/30 dev eth0")
            self.mend()
            # Known for good: nobody is told that a machine whose cable is cut cannot be found.
            neighbour = f"{self.address} lladdr {_HARDWARE_ADDRESS} nud permanent"
            _ip(f"neigh replace {neighbour} dev {self.name}")
            yield self
        finally:
            self.kill()
            _ip(f"netns del {self.name}")
            subprocess.run(["ip", "link", "del", self.name], capture_output=True, check=False)

    def join(self, run: runtime.Run, head: str) -> None:
        """Start Ray here, as a node of the cluster whose head has this address."""
        ray = str(Path(sys.executable).parent / "ray")
        port = run["address"].rpartition(":")[2]
        options = [f"--node-ip-address={self.address}", f"--num-cpus={CORES}"]
        started = subprocess.run(
            ["ip", "netns", "exec", self.name, ray, "start", f"--address={head}:{port}", *options],
            env=runtime.environment_of(run) | {_MARK: self.name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            check=False,
            text=True,
        )
        assert started.returncode == 0, started.stdout

    def has(self, process: psutil.Process) -> bool:
        """Whether the process runs here."""
        return process in processes.marked(_MARK, self.name)

    def kill(self) -> None:
        """End every process here; the system closes their connections."""
        memory = processes.shared_memory(processes.marked(_MARK, self.name))
        while living := processes.marked(_MARK, self.name):
            for process in living:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(living, timeout=5)
        for block in memory:
            block.unlink(missing_ok=True)

    def cut(self) -> None:
        """Cut the cable: what is sent from or to the node is lost, and nobody is told."""
        _ip(f"-n {self.name} link set eth0 down")

    def mend(self) -> None:
        """Plug the cable in."""
        _ip(f"-n {self.name} link set eth0 up")
        _ip(f"-n {self.name} route replace default via {self._network}.1")


@dataclass(frozen=True, slots=True)
class Asked:
    """One stream; times in seconds on the monotonic clock."""

    began: float
    ended: float
    outcome: str
    """`200` for a whole one, `cut` for one without its end, another status, or an error's name."""
    replica: str
    """Of the engine that answered; empty where none had begun."""


class Streams:
    """So many clients, each with one stream after the other, until the end of the block."""

    def __init__(self, url: str, model: str, clients: int) -> None:
        self.asked: list[Asked] = []
        self._url = url
        self._body = {
            "model": model,
            "prompt": PROMPT,
            "max_tokens": 64,
            "ignore_eos": True,
            "stream": True,
        }
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(clients)]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def replicas(self, since: float = 0.0) -> set[str]:
        """The engines behind the whole streams that began after this time."""
        return {each.replica for each in self.whole(since)}

    def whole(self, since: float = 0.0) -> list[Asked]:
        """The streams that began after this time and came to their end."""
        return [each for each in self.asked if each.began >= since and each.outcome == "200"]

    def broken(self) -> list[Asked]:
        """The streams that did not come to their end."""
        return [each for each in self.asked if each.outcome != "200"]

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as client:
            while not self._stop.is_set():
                self.asked.append(self._one(client))

    def _one(self, client: httpx.Client) -> Asked:
        began, replica = time.monotonic(), ""
        try:
            with client.stream("POST", "/v1/completions", json=self._body) as reply:
                replica = reply.headers.get("x-moe-serving-replica", "")
                body = reply.read().decode()
            whole = reply.status_code != 200 or body.rstrip().endswith("data: [DONE]")
            outcome = str(reply.status_code) if whole else "cut"
        except httpx.HTTPError as error:
            outcome = type(error).__name__
        return Asked(began, time.monotonic(), outcome, replica)


def told(streams: Streams, lost_at: float) -> str:
    """What the clients saw, for people: times are seconds after the loss."""
    outcomes = dict(Counter(each.outcome for each in streams.asked))
    broken = [
        f"{each.outcome} {each.began - lost_at:+.1f}..{each.ended - lost_at:+.1f} {each.replica}"
        for each in streams.broken()
    ]
    longest = max((each.ended - each.began for each in streams.whole(lost_at)), default=0.0)
    return f"{outcomes}; longest whole one after the loss {longest:.1f} s; broken: {broken}"


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)
