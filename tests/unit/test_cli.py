"""The commands' errors, as a user sees them; nothing is started."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serving import cli
from serving.stack import history, lifecycle, runtime
from serving.stack.events import EngineStatus, Status
from serving.stack.load import load_stack, shipped_stacks


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(runtime.HOME_VARIABLE, str(tmp_path))
    return tmp_path


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, arguments)
    return result.exit_code, result.output.replace("\n", " ").strip()


def test_a_bad_stack_is_refused_with_file_line_and_field(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text("schema: 1\ngateway:\n  prot: 1\nmodels:\n- {model: tiny-moe, gpu: cpu, "
                    "variants: {v: }}\n")  # fmt: skip
    assert run("up", str(path)) == (2, f"error: {path}:3: gateway.prot: did you mean port?")


def test_an_unknown_stack_names_those_there_are() -> None:
    assert run("up", "dmo") == (
        2,
        "error: dmo: no such stack file; did you mean demo? give a path or one of "
        + ", ".join(shipped_stacks()),
    )


def test_a_taken_port_is_refused_before_anything_starts(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, output = run("up", "demo", "--port", str(port))
    assert code == 2
    assert output.startswith(f"error: gateway.port: {port} is taken by ")
    assert runtime.running() is None


@pytest.mark.parametrize("arguments", [("status",), ("up", "--rollback")])
def test_without_a_running_stack_the_way_to_start_one_is_told(arguments: tuple[str, ...]) -> None:
    assert run(*arguments) == (2, "error: no stack runs; `moe-serving up STACK` starts one")


@pytest.mark.parametrize("arguments", [("up",), ("up", "demo", "--rollback")])
def test_a_stack_and_rollback_exclude_each_other(arguments: tuple[str, ...]) -> None:
    text = "error: give either a stack, or --rollback and nothing beside it"
    assert run(*arguments) == (2, text)


def test_rollback_without_a_change_before_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_running_stack", lambda: {"port_option": None})
    history.begin(load_stack("demo"))
    assert run("up", "--rollback") == (
        2,
        "error: there is nothing to go back to: this stack has not been changed since it was "
        "started; change it with `moe-serving up STACK`",
    )


def test_down_with_nothing_there_is_no_error() -> None:
    assert run("down") == (0, "ended 0 processes")


def test_status_as_json_names_every_engine_and_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineStatus(
        model="m",
        variant="mtp",
        default=True,
        app="engine-m-mtp-1",
        state="ready",
        running_replicas=1,
        wanted_replicas=1,
        max_model_len=2048,
        speculative={"method": "mtp", "num_speculative_tokens": 2},
    )
    found = Status(stack="demo", engines=(engine,), applications={"gateway": "RUNNING"})
    known = {"url": "http://127.0.0.1:8000", "started": 1.0}
    monkeypatch.setattr(lifecycle, "status", lambda _: (known, found))
    monkeypatch.setattr(lifecycle, "gateway_ready", lambda _: (True, "{}"))
    code, output = run("status", "--json")
    assert code == 0
    assert json.loads(output) == {
        "stack": "demo",
        "url": "http://127.0.0.1:8000",
        "started": 1.0,
        "ready": True,
        "engines": [engine.model_dump(mode="json")],
        "applications": {"gateway": "RUNNING"},
    }
    code, output = run("status")
    assert "m@mtp (default): ready, 1 of 1 replicas, mtp, n=2, 2048 tokens" in output


@pytest.mark.parametrize(
    ("arguments", "package"),
    [
        (("report", "a"), "matplotlib"),
        (("compare", "a", "b"), "jinja2"),
        (("export-policy", "a"), "scipy"),
    ],
)
def test_a_package_of_the_loadtest_extra_that_is_missing_is_named_with_the_cure(
    arguments: tuple[str, ...], package: str
) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None; sys.argv[1:] = {('study', *arguments)!r}; "
        "from serving.cli import main; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    text = f"error: {package} is not installed; run pip install 'moe-serving[loadtest]'\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", text)


def test_a_stack_that_the_check_finds_errors_in_is_not_started(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    path = tmp_path / "lab.yaml"
    path.write_text(
        "schema: 1\nmodels:\n- id: lab\n  inline: {path: checkpoint, max_context: 512}\n"
        "  gpu: cpu\n  variants: {plain: {}}\n"
    )
    code, output = run("up", str(path))
    assert code == 2
    assert "MTP006 lab@plain: the checkpoint cannot be read" in output
    assert "--force starts it all the same" in output
    assert runtime.running() is None
