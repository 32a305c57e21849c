"""GPUs of a machine, told by a stand-in for NVML."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from serving.planner.detect import class_of, detect
from serving.planner.errors import PlannerError

GIB = 1024**3


class NvmlError(Exception):
    """What NVML raises."""


def nvml(*gpus: tuple[str | bytes, int], starts: bool = True) -> SimpleNamespace:
    calls: list[str] = []

    def start() -> None:
        calls.append("init")
        if not starts:
            raise NvmlError("Driver Not Loaded")

    return SimpleNamespace(
        NVMLError=NvmlError,
        calls=calls,
        nvmlInit=start,
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda index: gpus[index],
        nvmlDeviceGetName=lambda handle: handle[0],
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=handle[1] * GIB),
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx3090ti"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtxpro6000maxq"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GB10", "gb10"),
        ("Tesla V100-SXM2-32GB", "v100"),
    ],
)
def test_a_name_of_nvml_is_a_class_of_the_catalogue(name: str, expected: str) -> None:
    assert class_of(name).id == expected


def test_all_cards_of_one_kind_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = nvml((b"NVIDIA GeForce RTX 3090", 24), ("NVIDIA GeForce RTX 3090", 23))
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    found = detect()
    assert (found.gpu.id, found.count, found.memory_gib) == ("rtx3090", 2, 23)
    assert fake.calls == ["init", "shutdown"]


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (nvml(), "--detect: NVML sees no GPU; give --gpu"),
        (nvml(starts=False), "--detect: NVML does not start (Driver Not Loaded); give --gpu"),
        (
            nvml(("NVIDIA H100 80GB HBM3", 80), ("NVIDIA L40S", 48)),
            "--detect: found 1 x h100, 1 x l40s; a plan is for one kind, give --gpu and --gpus",
        ),
    ],
)
def test_what_cannot_be_planned_for_is_told(
    monkeypatch: pytest.MonkeyPatch, fake: SimpleNamespace, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    with pytest.raises(PlannerError) as caught:
        detect()
    assert str(caught.value) == message


def test_a_card_that_the_catalogue_lacks_is_told_with_the_cure() -> None:
    with pytest.raises(PlannerError) as caught:
        class_of("NVIDIA GeForce GTX 970")
    assert str(caught.value).startswith(
        "--detect: found 'NVIDIA GeForce GTX 970', which the catalogue does not have; give the "
        "nearest of a100-80, b200,"
    )


def test_without_the_package_it_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(PlannerError) as caught:
        detect()
    assert str(caught.value) == (
        "--detect: the package nvidia-ml-py is not installed; run "
        "pip install 'moe-serving[detect]', or "
        "give --gpu"
    )
