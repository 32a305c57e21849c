"""The stack that a study derives, and which of its engines run at one time; none is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving.catalog.errors import ConfigError
from serving.stack import history, runtime
from serving.stack.engine_plan import plan_engines
from serving.stack.load import load_stack, shipped_stacks
from serving.studies import stage
from serving.studies.spec import StudySpec, load_study
from serving.studies.stage import StageError, arms_of, fitting_blocks, study_stack


def spec(**fields: Any) -> StudySpec:
    values = {
        "schema": 1,
        "name": "lab",
        "question": "Is it faster?",
        "stack": "demo",
        "arms": {"draft_tokens": [0, 1, 3]},
        "streams": [1],
        "max_tokens": [16],
        "repetitions": 1,
    }
    return StudySpec.model_validate(values | fields)


@pytest.mark.parametrize("name", shipped_stacks())
def test_generated_variants_of_every_shipped_stack_differ_in_n_alone(name: str) -> None:
    stack = study_stack(spec(stack=name))
    assert stack is not None
    plain, *others = plan_engines(stack)
    for plan in others:
        arguments = {k: v for k, v in plan.vllm_args.items() if k != "speculative_config"}
        assert arguments == plain.vllm_args


def test_generated_variants_have_the_study_s_settings_and_are_asked_by_name() -> None:
    study = spec(settings={"max_num_seqs": 64})
    stack = study_stack(study)
    assert stack is not None
    plain, one, three = plan_engines(stack)
    assert one.speculative == {"method": "mtp", "num_speculative_tokens": 1}
    assert three.speculative == {"method": "mtp", "num_speculative_tokens": 3}
    assert plain.max_num_seqs == 64
    arms = arms_of(study, stack, "http://127.0.0.1:8000/v1")
    assert [(arm.model, arm.draft_tokens) for arm in arms] == [
        ("tiny-moe@plain", 0),
        ("tiny-moe@mtp-1", 1),
        ("tiny-moe@mtp-3", 3),
    ]


def test_what_the_drafter_needs_on_its_hardware_goes_into_every_generated_variant() -> None:
    stack = study_stack(load_study("ampere-moe"))
    assert stack is not None
    drafting = [plan.speculative for plan in plan_engines(stack) if plan.speculative]
    assert [each["moe_backend"] for each in drafting] == ["triton"] * 4


def test_variants_of_the_stack_file_are_taken_as_they_are() -> None:
    stack = study_stack(spec(arms={"variants": ["mtp", "plain"]}))
    assert stack is not None
    own = {plan.app_name for plan in plan_engines(load_stack("demo"))}
    assert {plan.app_name for plan in plan_engines(stack)} == own


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"arms": {"variants": ["plain", "mpt"]}},
            "lab: arms.variants: found 'mpt'; demo has mtp, plain",
        ),
        ({"model": "tiny"}, "lab: model: found 'tiny'; demo has tiny-moe"),
    ],
)
def test_what_the_stack_does_not_have_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        study_stack(spec(**fields))
    assert str(caught.value) == text


def test_the_file_that_a_block_is_started_from_is_a_stack_of_those_engines(tmp_path: Path) -> None:
    stack = study_stack(spec())
    assert stack is not None
    server = stage._server(stage._only(stack, ["plain", "mtp-3"]), tmp_path)
    plans = {plan.variant: plan.app_name for plan in plan_engines(stack)}
    written = load_stack(tmp_path / "study.yaml")
    assert {plan.variant: plan.app_name for plan in plan_engines(written)} == {
        "plain": plans["plain"],
        "mtp-3": plans["mtp-3"],
    }
    assert server.command[1:3] == ["up", str(tmp_path / "study.yaml")]
    assert server.env[runtime.HOME_VARIABLE] == str(tmp_path / "home")


@pytest.mark.parametrize(
    ("gib", "blocks"), [(12, "all-at-once"), (11, "pairs"), (8, "pairs"), (7, "one-by-one")]
)
def test_as_many_engines_run_at_once_on_a_cpu_as_memory_allows(
    monkeypatch: pytest.MonkeyPatch, gib: int, blocks: str
) -> None:
    memory = SimpleNamespace(available=gib * 2**30)
    monkeypatch.setattr(stage.psutil, "virtual_memory", lambda: memory)
    assert fitting_blocks(spec(), study_stack(spec())) == blocks


@pytest.mark.parametrize(
    ("gpus", "blocks"), [(10, "all-at-once"), (4, "pairs"), (2, "one-by-one"), (0, "one-by-one")]
)
def test_a_gpu_is_for_one_engine_at_a_time(
    monkeypatch: pytest.MonkeyPatch, gpus: int, blocks: str
) -> None:
    study = load_study("ampere-moe").model_copy(update={"blocks": "auto"})
    monkeypatch.setattr(stage, "gpu_count", lambda: gpus)
    assert fitting_blocks(study, study_stack(study)) == blocks


def running(monkeypatch: pytest.MonkeyPatch, study: StudySpec) -> None:
    run = {"url": "http://127.0.0.1:8000", "ready": True}
    monkeypatch.setattr(runtime, "running", lambda: run)
    monkeypatch.setattr(runtime, "ray_answers", lambda _: True)
    monkeypatch.setattr(history, "current", lambda: study_stack(study))


def test_a_stack_that_runs_is_used_where_it_serves_the_same_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running(monkeypatch, spec())
    wanted = study_stack(spec(arms={"draft_tokens": [0, 3]}))
    assert wanted is not None
    found = stage.running_stack(wanted)
    assert found is not None
    assert found[0] == "http://127.0.0.1:8000/v1"


def test_a_stack_that_runs_other_engines_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    running(monkeypatch, spec())
    wanted = study_stack(spec(settings={"max_num_seqs": 64}, arms={"draft_tokens": [0]}))
    assert wanted is not None
    with pytest.raises(StageError, match=r"does not serve engine-tiny-moe-plain-\w{8} as the"):
        stage.running_stack(wanted)


class _Server:
    """A server that only notes what is done to it."""

    url = "http://127.0.0.1:1/v1"

    def __init__(self, folder: Path, fails: bool) -> None:
        self._folder, self._fails = folder, fails
        self.done: list[str] = []

    def start(self) -> None:
        self.done.append("start")
        (self._folder / "home").mkdir()
        (self._folder / "home" / "up.log").write_text("vLLM's own lines\n")

    def wait_until_ready(self, model: str, within_s: float) -> None:
        self.done.append(f"wait for {model}")
        if self._fails:
            raise RuntimeError("out of memory")

    def stop(self) -> None:
        self.done.append("stop")


@pytest.mark.parametrize("fails", [False, True])
def test_a_started_stack_is_ended_whatever_happens_and_its_log_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: bool
) -> None:
    servers: list[_Server] = []

    def make(_: object, folder: Path) -> _Server:
        servers.append(_Server(folder, fails))
        return servers[-1]

    monkeypatch.setattr(stage, "_server", make)
    stack = study_stack(spec())
    assert stack is not None
    variants: Sequence[str] = ["plain", "mtp-1"]
    with (
        pytest.raises(RuntimeError, match="out of memory" if fails else "a crash in the block"),
        stage.started(stack, variants, tmp_path / "stack.log", lambda _: None),
    ):
        raise RuntimeError("a crash in the block")
    waits = [f"wait for tiny-moe@{variant}" for variant in variants]
    assert servers[0].done == ["start", *(waits[:1] if fails else waits), "stop"]
    assert (tmp_path / "stack.log").read_text() == "vLLM's own lines\n"
    assert not servers[0]._folder.exists()
