"""What is measured: every target, the program behind it, and how each is started.

Owns commands, environments and the order of the layers; all stand before the same mock engine.
Leaves finding and ending processes to `overhead.processes`, and measuring to `measure`.
"""

from __future__ import annotations

import http.client
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from serving.engines.keys import KEY_FILE_VARIABLE, make_key_file
from serving.stack.environment import MARK, free_port, ray_environment, ray_token
from serving.studies.capacity import wire
from serving.studies.capacity.peers import LITELLM, VLLM_ROUTER, Peer
from serving.studies.capacity.ports import DeployedSettings, Ports
from serving.studies.capacity.wire import Asked
from serving.studies.overhead.processes import REQUEST_PATH, Kind
from serving.studies.overhead.servers import Server

DIRECT, RELAY, APP, LEASES, DEPLOYED = "direct", "relay", "app", "leases", "deployed"
ROUTER, PROXY = VLLM_ROUTER.name, LITELLM.name
LABELS = {
    DIRECT: "the mock engine itself",
    RELAY: "bare uvicorn relay",
    APP: "gateway's app under uvicorn",
    LEASES: "+ leases from Ray Serve",
    DEPLOYED: "+ HAProxy: the gateway as deployed",
    ROUTER: f"vllm-router {VLLM_ROUTER.version}",
    PROXY: f"LiteLLM proxy {LITELLM.version}",
}
PEERS: dict[str, Peer] = {ROUTER: VLLM_ROUTER, PROXY: LITELLM}
# All of one Ray cluster.
SERVED = (LEASES, DEPLOYED)
START_WITHIN_S = 240.0
ALL_KINDS = frozenset(Kind)
_LITELLM_CONFIG = """model_list:
  - model_name: {model}
    litellm_params: {{model: openai/{model}, api_base: "{url}/v1", api_key: none}}
litellm_settings: {{telemetry: false}}
"""
_LITELLM_ENV = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    # It listens on loopback, for as long as the benchmark runs.
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}


@dataclass(slots=True)
class Program(Server):
    """One program under measurement; its processes are found by its mark."""

    label: str = ""
    ports_file: Path | None = None
    """Written by a program that is reached at several ports, once it is ready."""

    def _answers(self, model: str) -> bool:
        if self.ports_file is not None and not self.ports_file.exists():
            return False
        body = wire.request_body(Asked(chunks=1, pause_ms=0, stream=False))
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{wire.PATH}",
            data=body,
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return b'"choices"' in reply.read()
        except (OSError, http.client.HTTPException):
            return False

    def failure(self, what: str) -> str:
        """What happened to this program, in a sentence, and the last lines of its log."""
        tail = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        return "\n".join([f"{self.label} {what}; its last lines:", *tail])


@dataclass(frozen=True, slots=True)
class Target:
    """One place that the load is sent to."""

    name: str
    port: int
    program: Program
    counted: frozenset[Kind]
    """The kinds of its processes that a request passes through."""

    @property
    def url(self) -> str:
        """Scheme, host and port."""
        return f"http://127.0.0.1:{self.port}"


def parse_targets(text: str | None) -> tuple[str, ...]:
    """The targets of `relay,app`, in the order of the layers; all of them for None.

    The relay and the engine itself are always among them, as everything is compared with these.
    Raises ValueError with the cure.
    """
    if text is None:
        return tuple(LABELS)
    asked = [part.strip() for part in text.split(",")]
    for name in asked:
        if name not in LABELS:
            raise ValueError(
                f"--targets: found {name!r}; write names among {', '.join(LABELS)}, with commas"
            )
    return tuple(name for name in LABELS if name in (DIRECT, RELAY, *asked))


class Stage:
    """All programs of one run, below one folder."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._names = names
        self.engine = _program("engine", LABELS[DIRECT], folder, "mock")
        socket = str(folder / "engine.sock")
        self.engine.command += [str(self.engine.port), socket]
        self._url = f"http://127.0.0.1:{self.engine.port}"
        self._socket = socket
        self.programs: dict[str, Program] = {
            name: self._made(name, folder) for name in names if name not in (DIRECT, *SERVED)
        }
        if set(names) & set(SERVED):
            self.programs[DEPLOYED] = self._deployed(folder)

    @property
    def everything(self) -> list[Program]:
        """Every program, the engine first."""
        return [self.engine, *self.programs.values()]

    def targets(self) -> list[Target]:
        """The targets, in the order of the layers; needs every program ready."""
        return [self._target(name) for name in self._names]

    def _target(self, name: str) -> Target:
        if name == DIRECT:
            return Target(name, self.engine.port, self.engine, frozenset())
        if name not in SERVED:
            program = self.programs[name]
            return Target(name, program.port, program, ALL_KINDS)
        program = self.programs[DEPLOYED]
        assert program.ports_file is not None
        ports = Ports.model_validate_json(program.ports_file.read_text(encoding="utf-8"))
        if name == LEASES:
            return Target(name, ports.replica, program, REQUEST_PATH - {Kind.PROXY})
        return Target(name, ports.deployed, program, REQUEST_PATH)

    def _made(self, name: str, folder: Path) -> Program:
        if name in (RELAY, APP):
            made = _program(name, LABELS[name], folder, name)
            made.command += [str(made.port), self._url, self._socket]
            return made
        listen = ["--host", "127.0.0.1", "--port"]
        made = _program(name, LABELS[name], folder, None)
        if name == ROUTER:
            own = ["--worker-urls", self._url, "--policy", "round_robin", "--log-level", "warning"]
            own += ["--prometheus-port", str(free_port())]
            made.command = [VLLM_ROUTER.command, *listen, str(made.port), *own]
            return made
        made.folder.mkdir(parents=True, exist_ok=True)
        config = made.folder / "config.yaml"
        config.write_text(_LITELLM_CONFIG.format(model=wire.MODEL, url=self._url))
        made.command = [LITELLM.command, *listen, str(made.port), "--config", str(config)]
        made.env = _LITELLM_ENV
        return made

    def _deployed(self, folder: Path) -> Program:
        made = _program(DEPLOYED, "the gateway on Ray Serve", folder, "deployed")
        made.folder.mkdir(parents=True, exist_ok=True)
        # Short: Ray's sockets live below it, and a socket's path has at most 107 bytes.
        temp = folder / "r"
        made.env = ray_environment(made.folder, temp) | ray_token(made.folder / "ray-token")
        make_key_file(Path(made.env[KEY_FILE_VARIABLE]))
        # Of a stack; these processes are found by the study's mark, and no `down` may end them.
        del made.env[MARK]
        made.ports_file = made.folder / "ports.json"
        given = DeployedSettings(
            port=made.port,
            engine_url=self._url,
            engine_socket=self._socket,
            temp=str(temp),
            haproxy_folder=made.env["RAY_SERVE_HAPROXY_SERVER_STATE_BASE"],
            ports_file=str(made.ports_file),
        )
        file = made.folder / "settings.json"
        file.write_text(given.model_dump_json(), encoding="utf-8")
        made.command.append(str(file))
        return made


def start(stage: Stage) -> None:
    """Start everything and return when all answer; raises ServerError."""
    for program in stage.everything:
        program.start()
    for program in stage.everything:
        program.wait_until_ready(wire.MODEL, START_WITHIN_S)


def _program(name: str, label: str, folder: Path, module: str | None) -> Program:
    command = [sys.executable, "-m", f"serving.studies.capacity.{module}"] if module else []
    return Program(name, free_port(), command, {}, folder / name, label=label)
