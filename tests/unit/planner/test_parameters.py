"""Parameters counted from an architecture, beside what the files hold."""

from __future__ import annotations

import json
import math
import struct

import pytest

from serving.catalog import find_model
from serving.demo import NAMES, checkpoint_path
from serving.planner.parameters import count_parameters


def tensors(model: str) -> dict[str, int]:
    """Elements by tensor, from the header of a demo model's safetensors file."""
    with (checkpoint_path(model) / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {
        name: math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
    }


@pytest.mark.parametrize("model", NAMES)
def test_every_parameter_of_a_demo_model_is_counted(model: str) -> None:
    counted = count_parameters(find_model(model).architecture)
    assert counted.total == sum(tensors(model).values())


@pytest.mark.parametrize("model", NAMES)
def test_the_mtp_head_of_a_demo_model_is_counted_apart(model: str) -> None:
    counted = count_parameters(find_model(model).architecture)
    held = sum(count for name, count in tensors(model).items() if name.startswith("mtp."))
    assert counted.mtp + counted.mtp_experts == held


def test_the_27b_has_as_many_parameters_as_its_bf16_files_have_room_for() -> None:
    counted = count_parameters(find_model("qwen3.8-27b").architecture)
    assert 2 * counted.total == pytest.approx(55.563e9, rel=1e-3)
    assert 2 * counted.vision / 1024**3 == pytest.approx(0.858, abs=1e-3)


def test_the_35b_uses_three_billion_parameters_for_a_token() -> None:
    # Field notes, 4.1: 1.935 B fixed and 0.1258 B for each of 8 experts of every layer.
    counted = count_parameters(find_model("qwen3.6-35b-a3b").architecture)
    fixed = counted.attention + counted.gdn + counted.shared + counted.lm_head
    assert fixed / 1e9 == pytest.approx(1.935, abs=0.01)
    assert counted.experts / 256 / 1e9 == pytest.approx(0.1258, abs=1e-4)


def test_a_tied_head_is_counted_once() -> None:
    counted = count_parameters(find_model("gemma-4").architecture)
    assert counted.lm_head == 5_376
    assert counted.embedding == 262_144 * 5_376
