"""What is started for which targets, and what is said where something is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from serving.cli import app
from serving.stack.environment import MARK, free_port
from serving.studies.capacity import measure, peers, study, targets
from serving.studies.capacity.deployed import replica_port
from serving.studies.capacity.measure import Plan
from serving.studies.capacity.peers import LITELLM, VLLM_ROUTER, Peer, PeerError
from serving.studies.capacity.ports import DeployedSettings, Ports
from serving.studies.capacity.targets import (
    DEPLOYED,
    DIRECT,
    LABELS,
    RELAY,
    Stage,
    Target,
    parse_targets,
)
from serving.studies.overhead.servers import ServerError

CONFIG = """global
    stats socket /tmp/x/admin.sock mode 600 level admin
    server-state-base /tmp/x
    server-state-file /tmp/x/server-state
defaults
    load-server-state-from-file global
frontend prometheus
    bind 127.0.0.1:1
frontend http_frontend
    bind 127.0.0.1:2 proto h1
backend http-gateway
    option httpchk GET /-/healthz
    default-server inter 5s check
    server SERVE_REPLICA_x 127.0.0.1:30000 check observe layer4
    server SERVE_PROXY_ACTOR-fallback 127.0.0.1:8500 check backup
listen stats
  bind 127.0.0.1:3
"""


def test_everything_is_compared_with_the_engine_and_the_bare_relay() -> None:
    assert parse_targets("litellm, app") == (DIRECT, RELAY, "app", "litellm")
    assert parse_targets(None) == tuple(LABELS)


@pytest.mark.parametrize("text", ["gatway", "", "app,,relay", "app;relay"])
def test_a_target_that_there_is_not_is_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(ValueError, match=r"--targets: found '.*'; write names among direct, relay"):
        parse_targets(text)


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("--targets", "gatway", "--targets: found 'gatway'"),
        ("--rounds", "0", "--rounds"),
        ("--connections", "0", "--connections"),
        ("--delay-ms", "0", "--delay-ms"),
        ("--json", "/nowhere/file.json", "--json: the folder /nowhere is not there"),
    ],
)
def test_the_command_refuses_what_cannot_be_measured(
    option: str, value: str, complaint: str
) -> None:
    result = CliRunner().invoke(app, ["bench", "gateway", option, value])
    assert result.exit_code != 0
    assert complaint in result.output


def test_only_what_is_asked_for_is_started(tmp_path: Path) -> None:
    stage = Stage(parse_targets("app"), tmp_path)
    assert [program.name for program in stage.everything] == ["engine", "relay", "app"]
    assert [target.name for target in stage.targets()] == ["direct", "relay", "app"]


def test_the_layers_of_ray_serve_are_one_program(tmp_path: Path) -> None:
    stage = Stage(parse_targets("leases,deployed"), tmp_path)
    assert [program.name for program in stage.everything] == ["engine", "relay", DEPLOYED]
    program = stage.programs[DEPLOYED]
    given = DeployedSettings.model_validate_json(Path(program.command[-1]).read_text())
    Path(given.ports_file).write_text(Ports(deployed=1, replica=2).model_dump_json())
    assert [(target.name, target.port) for target in stage.targets()[2:]] == [
        ("leases", 2),
        ("deployed", 1),
    ]


def test_the_deployed_gateway_is_no_stack_that_down_would_end(tmp_path: Path) -> None:
    program = Stage(parse_targets("deployed"), tmp_path).programs[DEPLOYED]
    assert MARK not in program.env
    assert program.env["RAY_SERVE_ENABLE_HA_PROXY"] == "1"


def test_all_stand_before_the_same_engine(tmp_path: Path) -> None:
    stage = Stage(parse_targets(None), tmp_path)
    url = f"http://127.0.0.1:{stage.engine.port}"
    assert url in stage.programs["relay"].command
    assert url in stage.programs["vllm-router"].command
    assert url in Path(stage.programs["litellm"].command[-1]).read_text()
    assert url in Path(stage.programs[DEPLOYED].command[-1]).read_text()


def test_a_program_that_fails_tells_its_last_lines(tmp_path: Path) -> None:
    stage = Stage(parse_targets("relay"), tmp_path)
    relay = stage.programs[RELAY]
    # An argument too few.
    relay.command.pop()
    try:
        relay.start()
        with pytest.raises(
            ServerError, match=r"bare uvicorn relay ended with status 1(.|\n)*unpack"
        ):
            relay.wait_until_ready("mock", within_s=30)
    finally:
        relay.stop()


def test_the_fallback_is_not_taken_for_the_gateway() -> None:
    assert replica_port(CONFIG) == 30000


def test_no_compromised_release_of_litellm_is_installed() -> None:
    assert LITELLM.version not in {"1.82.7", "1.82.8", "1.107.0"}
    assert LITELLM.requirement == f"litellm[proxy]=={LITELLM.version}"


def test_peers_lie_in_the_cache_by_their_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(peers.CACHE_VARIABLE, str(tmp_path))
    assert VLLM_ROUTER.folder == tmp_path / "moe-serving/bench/vllm-router-0.1.17"
    assert not VLLM_ROUTER.installed


def test_a_peer_that_is_not_installed_is_left_out_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(peers.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(measure, "WARM_UP_S", 0.1)
    said: list[str] = []
    plan = Plan(rounds=1, seconds=0.2, connections=2, chunks=2, delay_ms=1)
    measured = study.run_study(parse_targets("vllm-router"), plan, said.append, install_peers=False)
    assert "--install-peers" in measured.skipped["vllm-router"]
    assert {reading.target for reading in measured.readings} == {DIRECT, RELAY}
    assert any(line.startswith("vllm-router 0.1.17 is left out") for line in said)


@pytest.mark.parametrize("name", ["vllm-router", "app"])
def test_a_peer_that_fails_under_load_is_left_out_and_ours_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(measure, "WARM_UP_S", 0.1)
    plan = Plan(rounds=1, seconds=0.1, connections=2, chunks=2, delay_ms=1)
    stage = Stage((DIRECT,), tmp_path)
    # Nobody listens there.
    gone = Target(name, free_port(), stage.engine, targets.ALL_KINDS)
    try:
        targets.start(stage)
        if name == "app":
            with pytest.raises(ServerError, match="failed under load"):
                measure.run_rounds([*stage.targets(), gone], stage.engine, plan, print)
        else:
            readings, failed = measure.run_rounds(
                [*stage.targets(), gone], stage.engine, plan, print
            )
            assert {reading.target for reading in readings} == {DIRECT}
            assert "no connection to" in failed[name]
    finally:
        stage.engine.stop()


def test_an_environment_that_cannot_be_made_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(peers.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    peer = Peer("no-such-gateway", "1.0", "none")
    with pytest.raises(PeerError, match=r"no-such-gateway==1.0 was not installed: .*"):
        peers.install(peer)
    assert not peer.folder.exists()


def test_the_counted_processes_of_the_engine_itself_are_none(tmp_path: Path) -> None:
    stage = Stage(parse_targets("relay"), tmp_path)
    assert [bool(target.counted) for target in stage.targets()] == [False, True]
    assert targets.SERVED == ("leases", "deployed")
