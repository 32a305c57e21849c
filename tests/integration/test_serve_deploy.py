"""A stack that Ray Serve's own `serve deploy` starts and changes, on a Ray of its own.

It takes minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.stack.environment import MARK, free_port
from serving.stack.runtime import HOME_VARIABLE, log_file
from tests.integration.harness import (
    COMMAND,
    PROMPT,
    UNCOMPILED,
    Load,
    RunningStack,
    ended,
    sse_data,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
BIN = Path(sys.executable).parent
COMMAND_WITHIN_S = 120.0
STEP_WITHIN_S = 300.0


def content(port: int, max_model_len: int) -> dict[str, Any]:
    """tiny-moe alone, with room for its successor beside it."""
    model = {"model": "tiny-moe", "gpu": "cpu", "num_cpus": 0.2, "max_num_seqs": 16, **UNCOMPILED}
    return {
        "schema": 1,
        "name": "deployed",
        "gateway": {"port": port, "request_timeout_s": 120.0},
        "models": [{**model, "max_model_len": max_model_len, "variants": {"plain": {}}}],
    }


class ByHand:
    """A Ray that `ray start` brings up, and what `serve` says to it, as docs/running.md does it."""

    def __init__(self, stack: RunningStack, file: Path, temp: str) -> None:
        self._stack = stack
        self._address = f"http://127.0.0.1:{free_port()}"
        self._environment = self._shell_with(file)
        self._start_ray(temp)

    def _shell_with(self, file: Path) -> dict[str, str]:
        """The environment of a shell that has taken what `--env` prints."""
        script = f'eval "$({COMMAND} serve-config {file} --env)" && env -0'
        shell = subprocess.run(
            ["bash", "-c", script], env=self._stack.environment, capture_output=True, check=True
        )
        taken = dict(line.split("=", 1) for line in shell.stdout.decode().split("\0") if line)
        # Only here, so that what is left after a failure is found and ended.
        return taken | {MARK: str(self._stack.home)}

    def _start_ray(self, temp: str) -> None:
        self._run(
            "ray",
            "start",
            "--head",
            "--node-ip-address=127.0.0.1",
            f"--port={free_port()}",
            f"--temp-dir={temp}",
            f"--dashboard-port={self._address.rpartition(':')[2]}",
            f"--dashboard-agent-listen-port={free_port()}",
        )

    def _run(self, program: str, *arguments: str) -> str:
        """Its stdout; what goes wrong is in the stack's log."""
        with log_file().open("a") as log, tempfile.TemporaryFile("w+") as out:
            # Not a pipe: Ray's processes would hold it open.
            subprocess.run(
                [str(BIN / program), *arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                timeout=COMMAND_WITHIN_S,
                check=True,
            )
            out.seek(0)
            return out.read()

    def deploy(self, file: Path, *options: str | Path) -> set[str]:
        """Deploy a stack's config, and return the applications in it when they alone run."""
        config = self._stack.folder / "serve.yaml"
        written = self._stack.command("serve-config", file, *options, "-o", config)
        assert written.returncode == 0, written.stdout
        wanted = {each["name"] for each in yaml.safe_load(config.read_text())["applications"]}
        self._run("serve", "deploy", str(config), "-a", self._address)
        wait_until(lambda: self._running() == wanted, STEP_WITHIN_S, f"{wanted} run")
        return wanted

    def _running(self) -> set[str] | None:
        """The applications, where all of them run; `serve status` is what a person asks."""
        shown = yaml.safe_load(self._run("serve", "status", "-a", self._address))
        states: Mapping[str, Any] = shown["applications"]
        assert "DEPLOY_FAILED" not in {state["status"] for state in states.values()}, shown
        return set(states) if {s["status"] for s in states.values()} == {"RUNNING"} else None


@pytest.fixture
def deployed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningStack]:
    """Nothing runs yet; what is started is ended."""
    running = RunningStack(tmp_path)
    monkeypatch.setenv(HOME_VARIABLE, str(running.home))
    with running.ended_whatever_happens():
        yield running
    assert running.processes() == []
    shutil.rmtree((running.home / "haproxy").resolve())


@pytest.fixture
def temp() -> Iterator[str]:
    """A folder short enough for Ray's sockets."""
    folder = tempfile.mkdtemp(prefix="ms-", dir="/tmp")
    yield folder
    shutil.rmtree(folder)


def test_serve_deploy_starts_a_stack_and_updates_it_without_a_failed_request(
    temp: str, deployed: RunningStack
) -> None:
    old = deployed.write("old", content(deployed.port, 2048))
    new = deployed.write("new", content(deployed.port, 1536))
    ray = ByHand(deployed, old, temp)
    before = ray.deploy(old)

    body = {"model": "tiny-moe", "prompt": PROMPT, "max_tokens": 16, "stream": True}
    streamed = deployed.post("/v1/completions", body)
    assert streamed.status_code == 200, streamed.text
    assert streamed.text.rstrip().endswith("data: [DONE]")
    assert len(sse_data(streamed.text)) > 1
    gateway, engine = deployed.gateway_process(), deployed.engine("tiny-moe@plain").replica

    def max_model_len() -> int:
        return int(deployed.http.get("/v1/models/tiny-moe").json()["max_model_len"])

    with (
        Load(deployed.url, "tiny-moe", stream=True) as one,
        Load(deployed.url, "tiny-moe", stream=True) as two,
    ):
        both = ray.deploy(new, "--from", old, "--step", "load")
        assert max_model_len() == 2048
        assert ray.deploy(new, "--from", old, "--step", "switch") == both
        assert max_model_len() == 1536
        after = ray.deploy(new)
        counts = {load: len(load.outcomes) for load in (one, two)}
        wait_until(lambda: all(len(x.outcomes) > counts[x] for x in counts), 60, "load goes on")

    assert (len(before), len(both), before | after) == (2, 3, both)
    for load in (one, two):
        assert len(load.outcomes) > 20
        assert set(load.outcomes) == {"200"}
    wait_until(lambda: ended(engine), 60, "the old engine ends")
    assert deployed.gateway_process().pid == gateway.pid
