"""Training: a resumed run equals an unbroken one, and the export is what vLLM reads."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from serving.demo import checkpoint_path
from serving.demo.train import Run, export_checkpoint, learning_rate, per_expert

TOTAL = 4
# Two trainings beside whatever else the machine does.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def options() -> argparse.Namespace:
    return argparse.Namespace(
        model="tiny-moe",
        sequences=1,
        length=32,
        seed=3,
        learning_rate=1e-3,
        mtp_weight=0.3,
        mtp_steps=2,
        recursive_from=0.5,
    )


def run_of(options: argparse.Namespace, folder: Path) -> Run:
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    return Run(options, folder)


def test_a_resumed_run_equals_an_unbroken_one(options: argparse.Namespace, tmp_path: Path) -> None:
    tokens = torch.arange(500) % 50
    unbroken = run_of(options, tmp_path / "a")
    for _ in range(TOTAL):
        unbroken.advance(tokens, TOTAL)

    first = run_of(options, tmp_path / "b")
    for _ in range(TOTAL // 2):
        first.advance(tokens, TOTAL)
    first.save()
    second = run_of(options, tmp_path / "b")
    second.load()
    assert second.step == TOTAL // 2
    while second.step < TOTAL:
        second.advance(tokens, TOTAL)

    for name, value in unbroken.head.state_dict().items():
        torch.testing.assert_close(second.head.state_dict()[name], value, msg=name)
    assert second.figures == pytest.approx(unbroken.figures, rel=1e-3)


def test_the_export_has_the_shipped_checkpoint_s_tensors(
    options: argparse.Namespace, tmp_path: Path
) -> None:
    run = run_of(options, tmp_path)
    shipped = checkpoint_path("tiny-moe")
    (tmp_path / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(shipped / name, tmp_path / "tokenizer")
    export_checkpoint(run.model, run.head, tmp_path, tmp_path / "out", {"model": "tiny-moe"})

    def shapes(folder: Path) -> dict[str, list[int]]:
        with safe_open(folder / "model.safetensors", "pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118

    assert shapes(tmp_path / "out") == shapes(shipped)


def test_fused_experts_are_split_into_published_names() -> None:
    fused = torch.arange(8.0).reshape(2, 4, 1)
    split = per_expert("mlp.experts.gate_up_proj", fused)
    assert sorted(split) == [
        "mlp.experts.0.gate_proj.weight",
        "mlp.experts.0.up_proj.weight",
        "mlp.experts.1.gate_proj.weight",
        "mlp.experts.1.up_proj.weight",
    ]
    assert split["mlp.experts.1.up_proj.weight"].flatten().tolist() == [6.0, 7.0]


def test_the_learning_rate_warms_up_and_falls_to_a_twentieth() -> None:
    rates = [learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[0] == 0.5
    assert max(rates) == 1.0
    assert rates[-1] == pytest.approx(0.05, abs=0.001)
