"""What a machine tells of itself, and what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.studies import environment


def test_versions_and_cores_are_among_the_facts() -> None:
    facts = environment.machine_facts()
    assert {"system", "python", "cpu", "cores", "memory", "moe-serving"} <= facts.keys()
    assert all(facts.values())


def test_gpus_are_told_with_memory_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    row = "NVIDIA GeForce RTX 3090, 24576 MiB, 590.10\n"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(environment, "_output", lambda *_: (2 * row).strip())
    facts = environment.machine_facts()
    assert facts["gpus"] == "; ".join(["NVIDIA GeForce RTX 3090, 24576 MiB"] * 2)
    assert facts["driver"] == "590.10"
    assert environment.gpu_count() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert environment.gpu_count() == 1


def test_a_program_that_is_not_there_tells_nothing() -> None:
    assert environment._output("no-such-program-here") == ""


def test_energy_is_the_sum_over_the_counters(tmp_path: Path) -> None:
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    (zone / "energy_uj").write_text("2500000\n")
    assert environment.energy_counters(tmp_path)["intel-rapl:0"] == 2.5
    assert environment.energy_between({"a": 1, "b": 2}, {"a": 4, "b": 4}) == 5


def test_a_counter_that_began_anew_or_is_missing_gives_no_energy() -> None:
    assert environment.energy_between({"a": 9}, {"a": 1}) is None
    assert environment.energy_between({}, {}) is None
