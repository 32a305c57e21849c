"""The four servers that are compared: how each is started, reached and ended.

Owns their commands and environments, all from one engine plan, so that the engine's
arguments are the same. Leaves measuring to `measure`. Every process a server starts
carries a mark in its environment, by which it is found again and ended.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from serving.stack.engine_plan import EnginePlan, plan_engines
from serving.stack.environment import free_port, haproxy_places, ray_token
from serving.stack.load import load_stack, stack_path
from serving.studies.overhead import processes
from serving.studies.overhead.settings import RayLlmSettings

BARE, STACK, RAY_DEFAULT, RAY_DIRECT = "bare", "stack", "ray-default", "ray-direct"
LABELS = {
    BARE: "bare vLLM API server",
    STACK: "this stack",
    RAY_DEFAULT: "ray.serve.llm, default",
    RAY_DIRECT: "ray.serve.llm, direct streaming",
}
START_WITHIN_S = 420.0
READY_PROMPT = "def add(a, b):"
# Ray gives its workers one OpenMP thread; a bare server would take every core.
ENGINE_ENV = {"OMP_NUM_THREADS": "1"}
# Ray runs its workers at nice 15: they would lose to the client, and the bare server would not.
RAY_ENV = {"RAY_worker_niceness": "0"}
# Both HAProxy servers would otherwise give their replicas ports from the same range.
DIRECT_HTTP_PORTS, DIRECT_GRPC_PORTS, PORTS = 32000, 42000, 1000


class ServerError(RuntimeError):
    """A server of the comparison did not start; the text ends with its last lines."""


@dataclass(slots=True)
class Server:
    """One server under measurement, on a loopback port of its own."""

    name: str
    port: int
    command: list[str]
    env: dict[str, str]
    folder: Path
    stop_command: list[str] | None = None
    """Run before the processes are ended, for a server that has a way of its own."""
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    leader: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The base URL of its OpenAI API, without trailing slash."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def log(self) -> Path:
        """Where its output goes."""
        return self.folder / "log"

    def start(self) -> None:
        """Start the server; returns at once."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            # A session of its own: Ctrl-C in the terminal reaches the study, which ends it.
            self.leader = subprocess.Popen(
                self.command,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self, model: str, within_s: float = START_WITHIN_S) -> None:
        """Return when a one-token completion succeeds; raises ServerError."""
        deadline = time.monotonic() + within_s
        while not self._answers(model):
            code = self.leader.poll() if self.leader else None
            if code is not None and not (code == 0 and self.stop_command):
                raise ServerError(self.failure(f"ended with status {code}"))
            if time.monotonic() > deadline:
                raise ServerError(self.failure(f"was not ready within {within_s:.0f} s"))
            time.sleep(1)

    def processes(self) -> list[psutil.Process]:
        """Every living process of this server."""
        return processes.find(self.mark)

    def stop(self) -> None:
        """End every process of this server."""
        if self.leader is None:
            return
        # Before anything ends: a child whose parent is gone is no longer found by descent.
        own = self.processes()
        if self.stop_command is not None:
            subprocess.run(
                self.stop_command, env=self._environment(), capture_output=True, check=False
            )
        processes.end(own)
        processes.end(self.processes())
        self.leader.wait()
        self.leader = None

    def _environment(self) -> dict[str, str]:
        # Settings of the caller's own Ray or stack must not reach the servers.
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RAY_", "MOE_SERVING_"))
        }
        # A process that titles itself would otherwise overwrite the mark in its environment.
        return inherited | self.env | {processes.MARK: self.mark, "SPT_NOENV": "1"}

    def _answers(self, model: str) -> bool:
        body = {"model": model, "prompt": READY_PROMPT, "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                # A proxy may say 200 before there is anything behind it.
                return b'"choices"' in reply.read()
        except (OSError, http.client.HTTPException):
            return False

    def failure(self, what: str) -> str:
        """What happened to this server, in a sentence, and the last lines of its log."""
        tail = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        return "\n".join([f"{LABELS[self.name]} {what}; its last lines:", *tail])


def plain_stack(name: str, folder: Path) -> tuple[Path, EnginePlan]:
    """A stack file with only the plain variant of the first model of `name`, and its plan.

    Written into `folder`. Raises ConfigError where `name` is no stack or has no such variant.
    """
    raw = yaml.safe_load(stack_path(name).read_text(encoding="utf-8"))
    model = raw["models"][0]
    model |= {"variants": {"plain": model["variants"].get("plain")}, "default_variant": "plain"}
    model["env"] = {**model.get("env", {}), **ENGINE_ENV}
    file = folder / "plain.yaml"
    file.write_text(yaml.safe_dump({**raw, "models": [model]}), encoding="utf-8")
    return file, plan_engines(load_stack(file))[0]


def four_servers(stack_file: Path, plan: EnginePlan, folder: Path) -> list[Server]:
    """The servers in the order they are measured in, none started yet."""
    return [
        _bare(plan, folder / BARE),
        _stack(stack_file, folder / STACK),
        _ray_llm(RAY_DEFAULT, plan, folder / RAY_DEFAULT, {}),
        _ray_llm(RAY_DIRECT, plan, folder / RAY_DIRECT, _direct_streaming(folder / RAY_DIRECT)),
    ]


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """vLLM's arguments, by vLLM's names, as its API server takes them on the command line."""
    line: list[str] = []
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            line.append(option)
        elif value is False:
            line.append(option.replace("--", "--no-", 1))
        elif isinstance(value, dict | list):
            line += [option, json.dumps(value)]
        elif value is not None:
            line += [option, str(value)]
    return line


def _bare(plan: EnginePlan, folder: Path) -> Server:
    port = free_port()
    arguments = {**plan.vllm_args, **plan.frontend_args, "served_model_name": plan.model_id}
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    listen = ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    return Server(BARE, port, [*module, *listen, *command_line(arguments)], plan.env, folder)


def _stack(file: Path, folder: Path) -> Server:
    port = free_port()
    program = str(Path(sys.executable).parent / "moe-serving")
    env = {"MOE_SERVING_HOME": str(folder / "home"), **ray_token(folder / "ray-token")}
    up = [program, "up", str(file), "--port", str(port), "--detach"]
    return Server(STACK, port, up, env, folder, stop_command=[program, "down"])


def _ray_llm(name: str, plan: EnginePlan, folder: Path, env: Mapping[str, str]) -> Server:
    port = free_port()
    arguments = {**plan.vllm_args, **plan.frontend_args}
    # Ray's sockets live in this folder, and a socket's path has at most 107 bytes.
    temp = folder / "ray"
    settings = RayLlmSettings(
        port=port,
        temp=str(temp),
        model_id=plan.model_id,
        source=arguments.pop("model"),
        engine_kwargs=arguments,
        env=plan.env,
    )
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "settings.json"
    file.write_text(settings.model_dump_json(), encoding="utf-8")
    command = [sys.executable, "-m", "serving.studies.overhead.ray_llm", str(file)]
    return Server(
        name, port, command, {**env, **RAY_ENV, **ray_token(folder / "ray-token")}, folder
    )


def _direct_streaming(folder: Path) -> dict[str, str]:
    """The two variables of Ray's user guide, and places that no other HAProxy uses."""
    # HAProxy adds a folder named by 56 characters, and takes sockets of at most 97 in all.
    haproxy = folder.parent / "h"
    haproxy.mkdir(parents=True)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1",
        **haproxy_places(haproxy),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(DIRECT_HTTP_PORTS),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(DIRECT_HTTP_PORTS + PORTS),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(DIRECT_GRPC_PORTS),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(DIRECT_GRPC_PORTS + PORTS),
    }
