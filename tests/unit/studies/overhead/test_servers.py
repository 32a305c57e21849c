"""The servers' commands come from one plan, and their processes never outlive them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from serving.studies.overhead import processes, servers
from serving.studies.overhead.servers import Server, ServerError, command_line
from serving.studies.overhead.settings import RayLlmSettings
from serving.studies.overhead.study import parse_streams


def test_arguments_become_options_of_vllms_command_line() -> None:
    arguments = {
        "max_num_seqs": 16,
        "language_model_only": True,
        "enable_prefix_caching": False,
        "speculative_config": {"method": "mtp"},
        "revision": None,
    }
    assert command_line(arguments) == [
        "--max-num-seqs",
        "16",
        "--language-model-only",
        "--no-enable-prefix-caching",
        "--speculative-config",
        '{"method": "mtp"}',
    ]


def test_the_demo_is_reduced_to_its_plain_variant(tmp_path: Path) -> None:
    _, plan = servers.plain_stack("demo", tmp_path)
    assert (plan.variant, plan.is_default, plan.speculative) == ("plain", True, None)
    assert plan.env["OMP_NUM_THREADS"] == "1"


def test_all_servers_get_the_same_engine_arguments(tmp_path: Path) -> None:
    file, plan = servers.plain_stack("demo", tmp_path)
    bare, stack, default, direct = servers.four_servers(file, plan, tmp_path)
    wanted = {**plan.vllm_args, **plan.frontend_args}
    for option in command_line(wanted):
        assert option in bare.command
    assert str(file) in stack.command
    source = wanted.pop("model")
    for server in (default, direct):
        settings = RayLlmSettings.model_validate_json(Path(server.command[-1]).read_text())
        assert (settings.engine_kwargs, settings.source) == (wanted, source)
        assert settings.env == bare.env == plan.env


def test_only_direct_streaming_changes_rays_settings(tmp_path: Path) -> None:
    file, plan = servers.plain_stack("demo", tmp_path)
    _, _, default, direct = servers.four_servers(file, plan, tmp_path)
    assert default.env.keys() == {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", *servers.RAY_ENV}
    assert direct.env["RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING"] == "1"


def server(tmp_path: Path, program: str, **changes: Any) -> Server:
    values: dict[str, Any] = {
        "name": servers.BARE,
        "port": 9,
        "command": [sys.executable, "-c", program],
        "env": {},
        "folder": tmp_path,
    }
    return Server(**values | changes)


def test_the_callers_own_ray_and_stack_settings_do_not_reach_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setenv("MOE_SERVING_HOME", "/elsewhere")
    program = "import json, os, sys; json.dump(dict(os.environ), sys.stdout)"
    one = server(tmp_path, program, env={"VLLM_CPU_KVCACHE_SPACE": "1"})
    one.start()
    assert one.leader is not None
    one.leader.wait()
    one.stop()
    environment = json.loads(one.log.read_text())
    assert {"RAY_ADDRESS", "MOE_SERVING_HOME"}.isdisjoint(environment)
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert environment[processes.MARK] == one.mark


def test_a_server_that_ends_while_starting_shows_its_last_lines(tmp_path: Path) -> None:
    one = server(tmp_path, "print('no such model'); raise SystemExit(3)")
    one.start()
    with pytest.raises(ServerError) as failure:
        one.wait_until_ready("tiny-moe")
    one.stop()
    assert str(failure.value) == (
        "bare vLLM API server ended with status 3; its last lines:\nno such model"
    )


def test_stopping_ends_children_whose_parent_is_gone_too(tmp_path: Path) -> None:
    program = "import subprocess; subprocess.Popen(['sleep', '60'])"
    one = server(tmp_path, program)
    one.start()
    assert one.leader is not None
    one.leader.wait()
    assert [process.name() for process in one.processes()] == ["sleep"]
    one.stop()
    assert one.processes() == []


@pytest.mark.parametrize(
    ("text", "numbers"), [("1,8,16", (1, 8, 16)), (" 4 ", (4,)), ("2,2,1", (2, 1))]
)
def test_numbers_of_streams_are_read(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_streams(text) == numbers


@pytest.mark.parametrize("text", ["", "0", "1,,2", "-1", "1;2", "257", "9" * 5000])
def test_other_numbers_of_streams_are_refused_with_the_cure(text: str) -> None:
    with pytest.raises(ValueError, match="write numbers from 1 to 256, as 1,8,16"):
        parse_streams(text)
