"""The commands, as a user types them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from serving.planner import calibrate as calibration
from serving.planner.command import plan_app
from serving.planner.plot import write_plot
from serving.stack.load import load_stack

app = typer.Typer()
app.add_typer(plan_app, name="plan")


@app.callback()
def root() -> None:
    """So that `plan` stays a command of its own."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOE_SERVING_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path / "home"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def run_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


SMALL = ("--model", "qwen3.6-27b", "--gpu", "rtx3090", "--checkpoint", "int4-autoround")


def test_a_plan_answers_whether_how_fast_and_so() -> None:
    result = run(*SMALL, "--concurrency", "2")
    assert result.exit_code == 0
    for heading in ("Fits?", "How fast?", "So?", "predicted, not measured"):
        assert heading in result.stdout
    assert "How each figure is made" not in result.stdout


def test_explain_gives_the_formula_behind_each_figure() -> None:
    result = run(*SMALL, "--explain")
    assert "How each figure is made" in result.stdout
    assert "E(n) x T(0) / T(n)" in result.stdout


def test_json_has_every_answer() -> None:
    found = run_json(*SMALL)
    assert found["kind"] == "prediction"
    assert [each["draft_tokens"] for each in found["speeds"]] == list(range(7))
    assert found["speeds"][0]["speedup"] == 1
    assert [each["concurrency"] for each in found["loads"]][-1] == 256
    assert found["memory"][2]["block_tokens"] == 800
    assert found["memory"][0]["weights"]["mtp"] == 0
    assert found["recommendation"]["settings"]["gpu_memory_utilization"] == 0.93
    assert found["recommendation"]["advice"]
    assert {each["figure"] for each in found["formulas"]} >= {"weights", "GDN page", "speed-up"}


def test_a_kind_of_checkpoint_is_enough() -> None:
    found = run_json(
        "--model", "qwen3.6-35b-a3b", "--gpu", "rtx3090", "--gpus", "2", "--checkpoint", "int4"
    )
    assert found["checkpoint"] == "int4-awq"
    assert found["cards"] == 2


def test_cards_beyond_one_engine_make_more_engines() -> None:
    found = run_json("--model", "qwen3.6-35b-a3b", "--gpu", "h100", "--gpus", "4", "--tp", "2")
    assert (found["cards"], found["engines"]) == (2, 2)


def test_acceptance_by_position_is_used_as_given() -> None:
    found = run_json(*SMALL, "--per-position", ".8,.6,.4")
    assert found["acceptance"]["per_position"][:3] == [0.8, 0.6, 0.4]


def test_a_stack_file_is_written_and_loads(tmp_path: Path) -> None:
    file = tmp_path / "planned.yaml"
    result = run(*SMALL, "-o", str(file))
    assert result.exit_code == 0
    assert f"moe-serving up {file}" in result.stdout
    assert load_stack(file).models[0].model == "qwen3.6-27b"


def test_every_catalogued_class_has_a_line_or_a_reason() -> None:
    found = run_json("--model", "qwen3.6-35b-a3b", "--all-gpus")
    assert {"rtx3090", "b200", "cpu", "v100"} <= set(found)
    assert found["b200"]["recommendation"]["fits"] is True
    assert "plan calibrate" in found["cpu"]["error"]
    table = run("--model", "qwen3.6-35b-a3b", "--all-gpus").stdout
    assert "rtxpro6000maxq" in table


def test_a_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.svg"
    assert run(*SMALL, "--plot", str(file)).exit_code == 0
    assert "predicted, not measured" in file.read_text()


def test_a_plot_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run(*SMALL, "--plot", str(tmp_path / "plan.xyz"))
    assert result.exit_code == 2
    assert "name a .svg, .png or .pdf file" in result.stderr


def test_without_matplotlib_it_is_told_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert write_plot.__module__ == "serving.planner.plot"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run(*SMALL, "--plot", str(tmp_path / "plan.svg"))
    assert result.exit_code == 2
    assert "run pip install 'moe-serving[loadtest]'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--gpu", "h100"),
            "--model is missing; as in `moe-serving plan --model qwen3.6-27b --gpu",
        ),
        (
            ("--model", "qwen3.6-27b"),
            "--gpu is missing; as in `moe-serving plan --model qwen3.6-27b --gpu",
        ),
        (("--model", "qwen9", "--gpu", "h100"), "No model is called 'qwen9'."),
        (("--model", "qwen3.6-27b", "--gpu", "h999"), "No GPU class is called 'h999'."),
        ((*SMALL[:4], "--checkpoint", "int3"), "No checkpoint of qwen3.6-27b is called 'int3'."),
        ((*SMALL, "--gpus", "3", "--tp", "2"), "tp: found 2 of 3 cards; choose a divisor"),
        ((*SMALL, "--workload", "poetry"), "workload: found 'poetry'; choose mixed, code,"),
        ((*SMALL, "--acceptance", "75"), "acceptance: found 75; give accepted / drafted"),
        ((*SMALL, "--per-position", "a,b"), "per-position: found 'a,b'; write shares with"),
        (
            (*SMALL, "--acceptance", ".7", "--per-position", ".7"),
            "give one of --acceptance, --per-position and --acceptance-from",
        ),
        ((*SMALL, "--kv-dtype", "int2"), "No KV cache dtype is called 'int2'."),
        ((*SMALL, "--utilization", "2"), "utilization: found 2.0; give a share above 0, up to 1"),
        (("--model", "tiny-moe", "--gpu", "cpu"), "gpu: the bandwidth of a CPU is the machine's;"),
    ],
)
def test_an_error_is_one_line_with_its_cure(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")
    assert "Traceback" not in result.stderr


def test_validate_prints_every_row_and_the_medians() -> None:
    result = run("validate")
    assert result.exit_code == 0
    assert "a100-35b-k4" in result.stdout
    assert "median absolute error" in result.stdout
    found = run_json("validate")
    assert found["median_abs_speedup_error"] <= 0.12
    assert found["median_abs_plain_error"] <= 0.15
    assert len(found["rows"]) == 17


def test_validate_shows_what_was_skipped_and_why(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"rows": [{"id": "x", "model": "qwen9", "engine": "vllm", "gpu": "h100"}]}')
    result = run("validate", str(file))
    assert result.exit_code == 0
    assert "skipped x: No model is called 'qwen9'." in result.stdout


def test_a_calibrated_machine_is_planned_for(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr("serving.planner.command.measure_bandwidth", lambda: 12.5e9)
    result = run("calibrate")
    assert result.exit_code == 0
    assert "memory bandwidth 12.5 GB/s" in result.stdout
    assert (home / calibration.FILE).exists()
    found = run_json("--model", "tiny-moe", "--gpu", "cpu", "--context", "4096")
    assert found["speeds"][0]["tokens_per_s_per_request"] < 12.5e9 / 5e6
    assert found["ttft_s"] is None


def test_calibrating_from_what_is_no_study_is_refused(tmp_path: Path) -> None:
    result = run("calibrate", "--study", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: study: ")


def test_detected_cards_are_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from serving.catalog import find_gpu
    from serving.planner.detect import Detected

    monkeypatch.setattr(
        "serving.planner.command.detect", lambda: Detected(find_gpu("rtx3090"), 2, 23.5)
    )
    found = run_json("--model", "qwen3.6-35b-a3b", "--detect")
    assert (found["gpu"], found["cards"]) == ("rtx3090", 2)
    assert found["memory"][0]["memory"] == int(23.5 * 1024**3)
