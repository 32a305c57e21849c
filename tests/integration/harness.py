"""The stack under test, as a user and as an operator sees it.

Owns starting it with the product's own command, ending it whatever happens, and looking
into its processes. Leaves what must hold to the tests.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from serving.engines.keys import ENGINE_KEY_HEADER
from serving.stack.environment import free_port
from serving.stack.runtime import HOME_VARIABLE, log_file, own_processes
from serving.studies.chaos.processes import ended as ended
from serving.studies.chaos.processes import title

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
UP_WITHIN_S = 600.0
COMMAND = str(Path(sys.executable).parent / "moe-serving")

# Small limits where a test has to reach them, and room for a second engine beside the
# others when one is replaced: Ray counts 2 cores.
_ENGINE = {"gpu": "cpu", "num_cpus": 0.2, "max_model_len": 4096, "max_num_seqs": 16}
# Starts in half the time. The engine that drafts is compiled, as users have theirs.
UNCOMPILED = {"engine_args": {"enforce_eager": True}}
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
                "plain": UNCOMPILED,
            },
        },
        {
            "model": "tiny-dense",
            "aliases": ["dense"],
            **_ENGINE,
            **UNCOMPILED,
            "max_ongoing_requests": 2,
            "variants": {"plain": {}},
        },
    ],
}
# What tiny-dense becomes, and stays, in the tests that change the stack.
SHORTER = {"max_model_len": 2048, "aliases": ["dense", "small"]}
VARIANTS = ("tiny-moe@mtp", "tiny-moe@plain", "tiny-dense@plain")


def wait_until(condition: Callable[[], bool], within_s: float, what: str) -> None:
    """Return when `condition` holds; fail with `what` did not happen."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        time.sleep(0.1)


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


class Load:
    """Statuses of requests sent one after the other, by a thread."""

    def __init__(self, url: str, model: str, stream: bool) -> None:
        self.outcomes: list[str] = []
        self.streams = stream
        self._stop = threading.Event()
        self._body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "stream": stream}
        self._url = url
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as client:
            while not self._stop.is_set():
                self.outcomes.append(self._one(client))
                time.sleep(0.05)

    def _one(self, client: httpx.Client) -> str:
        try:
            reply = client.post("/v1/completions", json=self._body)
        except httpx.HTTPError as error:
            return type(error).__name__
        whole = not self._body["stream"] or reply.text.rstrip().endswith("data: [DONE]")
        return "cut" if reply.is_success and not whole else str(reply.status_code)


class Clients:
    """Streams and whole replies of the models, one after the other by a thread each."""

    def __init__(self, url: str, *models: str) -> None:
        self.loads = [Load(url, model, stream) for model in models for stream in (True, False)]

    def __enter__(self) -> Clients:
        for load in self.loads:
            load.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for load in self.loads:
            load.__exit__()

    def outcomes(self, streamed: bool | None = None) -> Counter[str]:
        """How often each status came so far; of streams or whole replies alone where told."""
        asked = [load for load in self.loads if streamed in (None, load.streams)]
        return Counter(outcome for load in asked for outcome in load.outcomes)

    def go_on(self, requests: int = 5) -> None:
        """Return when each of them has sent this many more requests."""
        before = [len(load.outcomes) for load in self.loads]
        wait_until(
            lambda: all(
                len(load.outcomes) >= count + requests
                for load, count in zip(self.loads, before, strict=True)
            ),
            60,
            "requests go on",
        )


def with_zeroed_head(checkpoint: Path, folder: Path) -> Path:
    """A copy in which every tensor of the MTP head is 0, as an exporter's dummy is."""
    shutil.copytree(checkpoint, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.startswith("mtp."):
            tensor.zero_()
    save_file(tensors, file, {"format": "pt"})
    return folder


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

    def changed(
        self,
        name: str,
        gateway: Mapping[str, Any] | None = None,
        moe: Mapping[str, Any] | None = None,
        dense: Mapping[str, Any] | None = None,
    ) -> Path:
        """A file of the stack with other values for the gateway, tiny-moe and tiny-dense."""
        content = copy.deepcopy(dict(STACK))
        content["gateway"] |= gateway or {}
        content["models"][0] |= moe or {}
        content["models"][1] |= dense or {}
        return self.write(name, content)

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

    def serve_warnings(self, lines: int = 15) -> str:
        """The last of them in the log of Serve's controller: replicas that failed or went."""
        temp = Path(json.loads((self.home / "run.json").read_text())["temp"])
        found: list[str] = []
        for log in sorted(temp.glob("session_2*/logs/serve/controller_*.log")):
            text = log.read_text(errors="replace").splitlines()
            found += [line for line in text if line.startswith(("WARNING", "ERROR"))]
        return "\n".join(line[:300] for line in found[-lines:])

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

    def replica_leases(self) -> dict[str, float]:
        """Leases that the engines' own replicas count as held; of those that answer."""
        name = "moe_serving_replica_leases"
        engines = {v: self.engines(v) for v in VARIANTS}
        return {v: each[0].metric(name, state="granted") for v, each in engines.items() if each}

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

    def replica_processes(self, start: str) -> list[psutil.Process]:
        """The processes of the Serve replicas whose application's name begins so."""
        prefix = f"ray::ServeReplica:{start}"
        return [p for p in self.processes() if title(p).startswith(prefix)]

    def replica_process(self, start: str) -> psutil.Process:
        """The only one."""
        found = self.replica_processes(start)
        assert len(found) == 1, f"{len(found)} replicas of {start}: {found}"
        return found[0]

    def engine(self, variant: str) -> Engine:
        """The one replica of `model@variant`."""
        found = self.engines(variant)
        assert len(found) == 1, f"{len(found)} replicas of {variant} answer /health"
        return found[0]

    def engines(self, variant: str) -> list[Engine]:
        """The replicas of `model@variant` whose port answers /health."""
        key = (self.home / "engine.key").read_text().split()[0]
        found = []
        for replica in self.replica_processes(_application(variant)):
            for connection in replica.net_connections("tcp"):
                # Ray's own ports listen on IPv6.
                if connection.status != psutil.CONN_LISTEN or ":" in connection.laddr.ip:
                    continue
                url = f"http://{connection.laddr.ip}:{connection.laddr.port}"
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                        found.append(Engine(replica, url, key))
        return found

    def replica_count(self, variant: str) -> int:
        """How many replicas of `model@variant` have a process."""
        return len(self.replica_processes(_application(variant)))

    def processes_of(self, name: str) -> list[psutil.Process]:
        """Those of the stack whose command line holds `name`."""
        return [p for p in self.processes() if name in title(p) and not ended(p)]

    def gateway_process(self) -> psutil.Process:
        return self.replica_process("gateway:")


@contextlib.contextmanager
def own_stack(
    folder: Path, content: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> Iterator[RunningStack]:
    """A stack of this content beside the shared one, started with `moe-serving up`."""
    running = RunningStack(folder)
    running.environment |= environment or {}
    before = os.environ.get(HOME_VARIABLE)
    os.environ[HOME_VARIABLE] = str(running.home)
    try:
        with running.ended_whatever_happens():
            file = running.write(str(content["name"]), content)
            result = running.up(file, "--port", str(running.port))
            assert result.returncode == 0, f"{result.stdout}\n{running.log_tail()}"
            yield running
    finally:
        os.environ.pop(HOME_VARIABLE)
        if before is not None:
            os.environ[HOME_VARIABLE] = before


def _application(variant: str) -> str:
    """How the name of the application of `model@variant` begins."""
    return f"engine-{variant.replace('@', '-')}-"
