"""Autoscaling in the stack file, what Serve gets of it, and an idle engine in `status`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from serving.catalog.errors import ConfigError
from serving.catalog.yaml_file import parse_yaml
from serving.cli import _engine_line
from serving.stack import status
from serving.stack.engine_plan import EnginePlan, plan_engines
from serving.stack.events import Status
from serving.stack.gateway_plan import plan_gateway
from serving.stack.load import load_stack
from serving.stack.spec import StackSpec

HEAD = "schema: 1\nname: s\nmodels:\n  - model: tiny-moe\n    gpu: cpu\n    variants: {plain: }\n"


def stack(autoscaling: str, gateway: str = "") -> StackSpec:
    text = f"{HEAD}    autoscaling: {{{autoscaling}}}\ngateway: {{{gateway}}}\n"
    return parse_yaml(text, StackSpec, name="s.yaml")


def plan(autoscaling: str) -> EnginePlan:
    (only,) = plan_engines(stack(autoscaling))
    return only


def test_what_is_left_out_is_as_serve_has_it() -> None:
    config = pytest.importorskip("ray.serve.config")
    spec = plan("max_replicas: 3").autoscaling
    assert spec is not None
    ours = config.AutoscalingConfig(**spec.model_dump())
    # 12 is 3/4 of the 16 requests that a CPU decodes at once.
    assert ours == config.AutoscalingConfig(max_replicas=3, target_ongoing_requests=12)


def test_every_setting_reaches_serve_under_its_name() -> None:
    config = pytest.importorskip("ray.serve.config")
    spec = load_stack("autoscaled").models[0].autoscaling
    assert spec is not None
    assert set(spec.model_dump()) <= set(config.AutoscalingConfig.model_fields)
    assert config.AutoscalingConfig(**spec.model_dump()).downscale_to_zero_delay_s == 20


@pytest.mark.parametrize(
    ("autoscaling", "message"),
    [
        (
            "max_replicas: 3, initial_replicas: 4",
            "initial_replicas: found 4; choose a number between min_replicas (1) and "
            "max_replicas (3)",
        ),
        (
            "max_replicas: 3, min_replicas: 2, initial_replicas: 1",
            "initial_replicas: found 1; choose a number between min_replicas (2) and "
            "max_replicas (3)",
        ),
        (
            "max_replicas: 3, downscale_to_zero_delay_s: 60",
            "downscale_to_zero_delay_s: given, but min_replicas is 1, so the last replica stays; "
            "remove it, or set min_replicas: 0",
        ),
        (
            "max_replicas: 3, look_back_period_s: 5",
            "look_back_period_s: found 5; should be greater than 10",
        ),
    ],
)
def test_what_serve_could_not_do_is_refused(autoscaling: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        stack(autoscaling)
    assert str(refused.value) == f"s.yaml:7: models[0].autoscaling.{message}"


def test_a_wait_for_an_engine_ends_before_the_request_does() -> None:
    def within(gateway: str) -> float:
        found = stack("max_replicas: 2", gateway)
        return plan_gateway(found, plan_engines(found)).settings.wake_timeout_s

    assert within("") == 300
    assert within("wake_timeout_s: 60") == 60
    assert within("request_timeout_s: 100") == 90


def application(running: int, wanted: int, starting: float | None = None) -> Any:
    """An application that scales by itself; `starting` is when one more replica began."""
    states: list[tuple[str, float]] = [("RUNNING", 0.0)] * running
    states += [] if starting is None else [("STARTING", starting)]
    replicas = [
        SimpleNamespace(state=SimpleNamespace(value=state), pid=1, start_time_s=began)
        for state, began in states
    ]
    deployment = SimpleNamespace(replicas=replicas, target_num_replicas=wanted, message="")
    running_word = SimpleNamespace(value="RUNNING")
    return SimpleNamespace(status=running_word, deployments={"d": deployment}, message="")


@pytest.mark.parametrize(
    ("known", "waits", "line"),
    [
        (application(0, 0), False, "idle, 0 of 0 replicas"),
        (application(0, 1, 88.0), False, "loading, 0 of 1 replicas, starting for 12 s"),
        (
            application(0, 1, 88.0),
            True,
            "waiting for resources, 0 of 1 replicas, starting for 12 s",
        ),
        (application(1, 2, 88.0), False, "ready, 1 of 2 replicas, starting for 12 s"),
        (application(2, 2), False, "ready, 2 of 2 replicas"),
    ],
)
def test_status_shows_how_far_an_engine_is(
    known: Any, waits: bool, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = load_stack("autoscaled")
    (engine,) = plan_engines(found)
    asked: list[str] = []

    def unfit(name: str) -> str:
        asked.append(name)
        return ""

    monkeypatch.setattr(status, "applications", lambda: {engine.app_name: known})
    monkeypatch.setattr(status, "unplaced", lambda: [f"x{engine.app_name}"] if waits else [])
    monkeypatch.setattr(status, "unfit", unfit)
    monkeypatch.setattr("serving.stack.status.time.time", lambda: 100.0)
    read = status.read(found)
    assert isinstance(read, Status)
    shown = _engine_line(read.engines[0])
    assert shown.startswith(f"tiny-moe@plain (default): {line}, no drafting, 2048 tokens, ")
    # The question whether it is fit would wake an engine that sleeps.
    assert asked == ([engine.app_name] if line.startswith("ready") else [])
