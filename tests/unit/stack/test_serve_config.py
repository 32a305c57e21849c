"""A stack as a Serve config, the steps of an update by it, and the command that writes both."""

from __future__ import annotations

import ast
import inspect
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as built
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema
from typer.testing import CliRunner

from serving import cli
from serving.catalog.yaml_file import parse_yaml
from serving.engines.keys import KEY_FILE_VARIABLE
from serving.gateway.settings import GatewaySettings
from serving.stack import applications, runtime
from serving.stack.applications import EngineArgs, engine_part, gateway_part
from serving.stack.engine_plan import plan_engines
from serving.stack.environment import MARK
from serving.stack.gateway_plan import plan_gateway
from serving.stack.load import load_stack, shipped_stacks
from serving.stack.serve_config import as_exports, environment, serve_config, to_yaml
from serving.stack.spec import StackSpec
from serving.stack.update import UpdateRefused


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "home"
    monkeypatch.setenv(runtime.HOME_VARIABLE, str(folder))
    yield folder
    if (folder / "haproxy").is_dir():
        shutil.rmtree((folder / "haproxy").resolve())


def stack(model: str = "", gateway: str = "port: 8100", variants: str = "a: , b: ") -> StackSpec:
    return parse_yaml(
        f"schema: 1\nname: s\ngateway: {{{gateway}}}\nmodels:\n"
        f"- {{id: m, gpu: cpu, inline: {{path: w, max_context: 4096}}, "
        f"default_variant: a, {model} variants: {{{variants}}}}}\n",
        StackSpec,
    )


OLD = stack()
NEW = stack(variants="a: , b: {max_num_seqs: 4}")
KEPT, OLD_B = (plan.app_name for plan in plan_engines(OLD))
NEW_B = plan_engines(NEW)[1].app_name


def names(config: dict[str, Any]) -> list[str]:
    return [each["name"] for each in config["applications"]]


def application(config: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in config["applications"] if each["name"] == name)


def version(config: dict[str, Any], name: str) -> str:
    """Serve replaces an application's replicas where this is another."""
    return str(get_app_code_version(ServeApplicationSchema(**application(config, name))))


def routed_to(config: dict[str, Any]) -> list[str]:
    given = application(config, "gateway")["deployments"][0]["user_config"]
    table = GatewaySettings.model_validate(given).table
    return [variant.app_name for variant in table.models[0].variants]


# --- the config ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_stacks())
def test_serve_takes_the_config_of_every_shipped_stack_and_it_survives_yaml(name: str) -> None:
    config = serve_config(load_stack(name), None)
    text = to_yaml(config)
    read = yaml.safe_load(text)
    assert read == json.loads(json.dumps(config))
    schema = ServeDeploySchema.model_validate(read)
    assert schema.proxy_location == "HeadOnly"
    assert schema.model_dump(exclude_unset=True, mode="json") == read
    # A repeated value is written out, for people and for Helm.
    assert "&id" not in text


def test_the_config_has_the_address_and_every_engine_and_the_gateway() -> None:
    config = serve_config(stack(gateway="host: 0.0.0.0, access: open, port: 8123"), None)
    assert config["http_options"] == {"host": "0.0.0.0", "port": 8123}
    assert names(config) == [KEPT, OLD_B, "gateway"]
    routes = [each["route_prefix"] for each in config["applications"]]
    assert routes == [None, None, "/"]
    assert routed_to(config) == [KEPT, OLD_B]


@pytest.mark.parametrize(
    "setting",
    [
        "replicas: 2,",
        "max_ongoing_requests: 7,",
        "aliases: [n],",
        "routing: {balancing: session-hash},",
    ],
)
def test_what_changes_in_place_with_up_replaces_no_replica_with_a_config_either(
    setting: str,
) -> None:
    before, after = serve_config(OLD, None), serve_config(stack(model=setting), None)
    assert before != after
    assert names(before) == names(after)
    assert [version(before, name) for name in names(before)] == [
        version(after, name) for name in names(after)
    ]


def test_an_engine_scales_by_the_config_as_by_up() -> None:
    fixed = application(serve_config(stack(model="replicas: 3,"), None), KEPT)
    scaled = application(serve_config(stack(model="autoscaling: {max_replicas: 2},"), None), KEPT)
    options = fixed["deployments"][0]
    assert (options["num_replicas"], options["autoscaling_config"]) == (3, None)
    options = scaled["deployments"][0]
    assert "num_replicas" not in options
    assert options["autoscaling_config"]["max_replicas"] == 2


def test_a_builder_is_found_by_its_import_path_and_its_args_by_their_class() -> None:
    plans = plan_engines(OLD)
    for part in (engine_part(plans[0]), gateway_part(plan_gateway(OLD, plans))):
        module, _, function = part.import_path.partition(":")
        assert module == applications.__name__
        parameters = inspect.signature(getattr(applications, function)).parameters
        # As Serve reads it: a name in place of the class would leave the args a plain dict.
        assert [p.annotation for p in parameters.values()] == [type(part.args)]
        assert type(part.args).model_validate(part.args.model_dump(mode="json")) == part.args


def test_the_gateway_is_built_from_its_args_and_takes_the_options_of_the_config() -> None:
    entry = application(serve_config(OLD, None), "gateway")
    deployment = built(applications.gateway, entry["args"])._bound_deployment
    (options,) = entry["deployments"]
    assert deployment.name == options.pop("name")
    changed = deployment.options(**options)
    assert changed.user_config == options["user_config"]
    assert changed.ray_actor_options["num_cpus"] == 0.1


@pytest.mark.parametrize(("setting", "most", "surge"), [("", None, 100), ("1", 1, 0)])
def test_a_new_gateway_starts_before_the_old_ends_unless_nodes_may_hold_no_more(
    setting: str, most: int | None, surge: int
) -> None:
    spec = stack(gateway=f"max_replicas_per_node: {setting}" if setting else "")
    args = application(serve_config(spec, None), "gateway")["args"]
    deployment = built(applications.gateway, args)._bound_deployment
    assert deployment._replica_config.max_replicas_per_node == most
    assert deployment._deployment_config.max_surge_percent == surge


def test_unknown_args_of_an_engine_are_refused() -> None:
    args = engine_part(plan_engines(OLD)[0]).args.model_dump()
    with pytest.raises(ValueError, match="gpu_count"):
        EngineArgs.model_validate(args | {"gpu_count": 1})


def test_only_an_engine_that_drafts_is_asked_to_report_on_drafting() -> None:
    mtp = "b: {speculative: {method: mtp, num_speculative_tokens: 1}}"
    plain, drafting = plan_engines(stack(variants=f"a: , {mtp}"))
    reports = "per_request_spec_decode_metrics"
    assert reports not in engine_part(plain).args.vllm_args
    assert engine_part(drafting).args.vllm_args[reports] == "summary"


def test_the_builders_module_loads_neither_ray_nor_vllm_by_itself() -> None:
    tree = ast.parse(inspect.getsource(applications))
    imported = {
        alias.name if isinstance(node, ast.Import) else str(node.module)
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not {name for name in imported if name.startswith(("ray", "vllm", "serving.engines"))}


# --- an update -----------------------------------------------------------------------------


def test_an_update_loads_then_switches_then_ends_what_is_old() -> None:
    load, switch, finish = (serve_config(NEW, OLD, s) for s in ("load", "switch", "finish"))
    assert names(load) == names(switch) == [OLD_B, KEPT, NEW_B, "gateway"]
    assert routed_to(load) == [KEPT, OLD_B]
    assert routed_to(switch) == routed_to(finish) == [KEPT, NEW_B]
    assert finish == serve_config(NEW, None)


def test_no_step_of_an_update_replaces_a_replica_of_what_stays() -> None:
    steps = [serve_config(OLD, None)]
    steps += [serve_config(NEW, OLD, step) for step in ("load", "switch", "finish")]
    for name in ("gateway", KEPT):
        assert len({version(config, name) for config in steps}) == 1


def test_an_engine_of_both_is_as_the_new_stack_has_it_from_the_first_step_on() -> None:
    load = serve_config(stack(model="replicas: 2,"), OLD, "load")
    assert names(load) == [KEPT, OLD_B, "gateway"]
    assert application(load, KEPT)["deployments"][0]["num_replicas"] == 2


@pytest.mark.parametrize("changed", ["port: 8200", "port: 8100, host: 0.0.0.0, access: open"])
def test_an_update_of_what_a_running_serve_cannot_change_is_refused(changed: str) -> None:
    with pytest.raises(UpdateRefused, match=r"gateway\.(port|host): found .*; `serve shutdown`"):
        serve_config(stack(gateway=changed), OLD, "load")


# --- the environment -----------------------------------------------------------------------


def test_a_shell_takes_the_environment_and_it_names_files_only(home: Path) -> None:
    variables = environment(OLD)
    key = Path(variables[KEY_FILE_VARIABLE])
    token = Path(variables["RAY_AUTH_TOKEN_PATH"])
    assert (key.parent, token.parent) == (home, home)
    text = as_exports(variables | {"SPACED": "a b'c"})
    for secret in (key, token):
        assert secret.stat().st_mode & 0o777 == 0o600
        assert secret.read_text().strip() not in text
    shown = subprocess.run(
        ["sh", "-c", f'{text}env -0; printf %s "$SPACED"'], capture_output=True, check=True, env={}
    ).stdout.decode()
    assert shown.endswith("a b'c")
    taken = dict(line.split("=", 1) for line in shown.split("\0")[:-1])
    assert variables.items() <= taken.items()


def test_what_a_shell_starts_with_the_environment_is_not_ended_by_down() -> None:
    assert MARK not in environment(OLD)


def test_the_key_and_haproxys_place_stay_the_same() -> None:
    first, second = environment(OLD), environment(OLD)
    place = "RAY_SERVE_HAPROXY_SOCKET_PATH"
    assert (first[KEY_FILE_VARIABLE], first[place]) == (second[KEY_FILE_VARIABLE], second[place])
    assert Path(first[place]).parent.is_dir()
    # Ray puts a folder with the node's name, of 56 characters, before a socket's own name.
    assert len(first[place]) + 57 <= 97


def test_haproxys_place_is_made_anew_where_a_restart_took_it(home: Path) -> None:
    environment(OLD)
    shutil.rmtree((home / "haproxy").resolve())
    assert Path(environment(OLD)["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent.is_dir()


# --- the command ---------------------------------------------------------------------------


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["serve-config", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_command_prints_the_config_or_writes_it(tmp_path: Path) -> None:
    code, shown = run("demo")
    assert code == 0
    assert yaml.safe_load(shown) == serve_config(load_stack("demo"), None)
    assert run("demo", "-o", tmp_path / "out.yaml") == (0, "")
    assert (tmp_path / "out.yaml").read_text() == shown


def test_the_command_prints_the_environment() -> None:
    code, shown = run("demo", "--env")
    assert code == 0
    assert "export RAY_SERVE_ENABLE_HA_PROXY=1\n" in shown


@pytest.mark.parametrize("step", ["load", "switch"])
def test_a_step_of_an_update_needs_what_is_updated(step: str) -> None:
    text = f"error: --step {step} is of an update; name the stack that runs with --from"
    code, shown = run("demo", "--step", step)
    assert (code, " ".join(shown.split())) == (2, text)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "out.yaml"
    code, shown = run("demo", "-o", path)
    text = f"error: {path}: no such file or directory; name another file"
    assert (code, shown.replace("\n", "")) == (2, text.replace("\n", ""))
