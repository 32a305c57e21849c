"""The stack under test, as a user and as an operator sees it.

Owns starting it with the product's own command, ending it whatever happens, and looking
into its processes. Leaves what must hold to the tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from serving.engines.keys import ENGINE_KEY_HEADER
from serving.stack.environment import free_port
from serving.stack.runtime import HOME_VARIABLE, log_file, own_processes

PROMPT = "def add(a, b):"
CODE_PROMPTS = (
    "def moving_average(values, window):\n    total = 0\n    result = []\n    for",
    "import os\n\ndef largest_files(folder, count=10):\n    sizes = []\n    for root, dirs",
    "class RetryPolicy:\n    def __init__(self, attempts=3, delay=0.5):\n        self.attempts",
    "def merge_intervals(intervals):\n    if not intervals:\n        return []\n    intervals",
    'class Inventory:\n    """Counts the parts in a warehouse."""\n\n    def __init__(self):\n',
    "def read_lines(path):\n    with open(path) as file:\n        for line in",
)
# Longer than any test waits on one stream.
ENDLESS = {"max_tokens": 3900, "ignore_eos": True}
UP_WITHIN_S = 420.0
COMMAND = str(Path(sys.executable).parent / "moe-serving")

# Small limits where a test has to reach them, and room for a second engine beside the
# others when one is replaced: Ray counts 2 cores.
_ENGINE = {"gpu": "cpu", "num_cpus": 0.3, "max_model_len": 4096, "max_num_seqs": 16}
STACK: Mapping[str, Any] = {
    "schema": 1,
    "name": "integration",
    "gateway": {
        "max_body_mib": 1,
        "request_timeout_s": 120.0,
        "queue_timeout_s": 3.0,
        "keep_alive_s": 0.5,
        "cors_origins": ["https://app.example"],
    },
    "models": [
        {
            "model": "tiny-moe",
            "aliases": ["moe"],
            **_ENGINE,
            "default_variant": "mtp",
            "variants": {
                "mtp": {"speculative": {"method": "mtp", "num_speculative_tokens": 2}},
                "plain": {},
            },
        },
        {
            "model": "tiny-dense",
            "aliases": ["dense"],
            **_ENGINE,
            "max_ongoing_requests": 2,
            "variants": {"plain": {}},
        },
    ],
}
VARIANTS = ("tiny-moe@mtp", "tiny-moe@plain", "tiny-dense@plain")


def wait_until(condition: Callable[[], bool], within_s: float, what: str) -> None:
    """Return when `condition` holds; fail with `what` did not happen."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        time.sleep(0.1)


def ended(process: psutil.Process) -> bool:
    """Whether it does nothing any more; its parent may not have looked yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def halted(process: psutil.Process) -> Iterator[None]:
    """The process stands still in the block."""
    process.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def value_of(exposition: str, name: str, **labels: str) -> float:
    """The sum of all samples of this name that carry these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def sse_data(body: str) -> list[dict[str, Any]]:
    """The JSON of every `data:` line of an SSE body, but for the final [DONE]."""
    lines = [line[5:].strip() for line in body.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine replica: its process, its own port, and what answers behind it."""

    replica: psutil.Process
    url: str
    key: str = field(repr=False)

    @property
    def core(self) -> psutil.Process:
        """vLLM's engine core."""
        children = self.replica.children(recursive=True)
        return next(child for child in children if "EngineCore" in " ".join(child.cmdline()))

    def get(self, path: str) -> httpx.Response:
        headers = {ENGINE_KEY_HEADER: self.key}
        return httpx.get(self.url + path, headers=headers, timeout=10, trust_env=False)

    def metric(self, name: str, **labels: str) -> float:
        return value_of(self.get("/metrics").text, name, **labels)

    def descriptors(self) -> int:
        return int(self.replica.num_fds())


class RunningStack:
    """The stack that all integration tests share."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.file = self.write("integration", STACK)
        self.environment = {**os.environ, HOME_VARIABLE: str(self.home)}
        self.http = httpx.Client(base_url=self.url, timeout=90, trust_env=False)

    # --- the command ------------------------------------------------------------------

    def write(self, name: str, content: Mapping[str, Any]) -> Path:
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(dict(content), sort_keys=False))
        return path

    def command(
        self, *arguments: str | Path, within_s: float = 60.0, home: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `moe-serving`; stdout holds both of its outputs."""
        environment = self.environment | ({HOME_VARIABLE: str(home)} if home else {})
        return subprocess.run(
            [COMMAND, *map(str, arguments)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=within_s,
            check=False,
        )

    def up(self, file: Path | None = None, *options: str) -> subprocess.CompletedProcess[str]:
        """Start the stack, or change it to `file`'s."""
        target = () if file is None else (file,)
        return self.command("up", *target, "--detach", *options, within_s=UP_WITHIN_S)

    @contextlib.contextmanager
    def ended_whatever_happens(self) -> Iterator[None]:
        """End the stack after the block, and also where this process does not get to it.

        The guard waits for its stdin to close, which it does when this process ends,
        however it ends.
        """
        self.home.mkdir(parents=True)
        with (self.home / "down.log").open("w") as log:
            guard = subprocess.Popen(
                ["/bin/sh", "-c", 'cat > /dev/null; exec "$0" down', COMMAND],
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield
        finally:
            assert guard.stdin is not None
            guard.stdin.close()
            guard.wait(timeout=90)

    def log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(log_file().read_text(errors="replace").splitlines()[-60:])
        return "(no log)"

    # --- requests ---------------------------------------------------------------------

    def post(self, path: str, body: Mapping[str, Any], **options: Any) -> httpx.Response:
        return self.http.post(path, json=dict(body), **options)

    def complete(self, model: str, prompt: str = PROMPT, **fields: Any) -> dict[str, Any]:
        """A greedy completion that must succeed, as JSON."""
        body = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0, **fields}
        reply = self.post("/v1/completions", body)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def tokens(self, model: str, **prompt: Any) -> list[int]:
        """What /tokenize makes of `prompt=` or `messages=`."""
        reply = self.post("/tokenize", {"model": model, **prompt})
        assert reply.status_code == 200, reply.text
        tokens: list[int] = reply.json()["tokens"]
        return tokens

    def metric(self, name: str, **labels: str) -> float:
        return value_of(self.http.get("/metrics").text, name, **labels)

    def leases(self) -> float:
        return self.metric("moe_serving_leases")

    def readiness(self) -> dict[str, str]:
        """Each variant's state by /readyz; {} where the gateway does not answer."""
        try:
            variants: dict[str, str] = self.http.get("/readyz").json().get("variants", {})
        except (httpx.HTTPError, ValueError):
            return {}
        return variants

    def answers(self, name: str) -> bool:
        body = {"model": name, "prompt": PROMPT, "max_tokens": 1}
        try:
            return self.post("/v1/completions", body).status_code == 200
        except httpx.HTTPError:
            return False

    # --- processes --------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        return own_processes()

    def replica_process(self, start: str) -> psutil.Process:
        """The one process of a Serve replica whose application's name begins so."""
        found = [p for p in self.processes() if _title(p).startswith(f"ray::ServeReplica:{start}")]
        assert len(found) == 1, f"{len(found)} replicas of {start}: {found}"
        return found[0]

    def engine(self, variant: str) -> Engine:
        """The one replica of `model@variant`."""
        replica = self.replica_process(f"engine-{variant.replace('@', '-')}-")
        key = (self.home / "engine.key").read_text().split()[0]
        for connection in replica.net_connections("tcp"):
            # Ray's own ports listen on IPv6.
            if connection.status != psutil.CONN_LISTEN or ":" in connection.laddr.ip:
                continue
            url = f"http://{connection.laddr.ip}:{connection.laddr.port}"
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                    return Engine(replica, url, key)
        raise AssertionError(f"no port of {variant} answers /health")

    def gateway_process(self) -> psutil.Process:
        return self.replica_process("gateway:")


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
