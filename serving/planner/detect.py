"""Which GPUs this machine has, as classes of the catalogue.

Owns asking NVML and matching names. NVML's Python binding is an optional package and is
imported on first use. Leaves the classes themselves to the catalogue.
"""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

from serving.catalog import list_gpus
from serving.catalog.gpus import GpuClass
from serving.planner.errors import PlannerError
from serving.planner.memory import GIB

# Words of NVML's names that the ids of the catalogue leave out.
_LEFT_OUT = (
    "nvidia",
    "geforce",
    "tesla",
    "blackwell",
    "workstationedition",
    "workstation",
    "generation",
)
# Ids that stand for one form of a chip that has several.
_SHORT = {"a100-80": "a100"}


@dataclass(frozen=True, slots=True)
class Detected:
    """The GPUs found: all of one class."""

    gpu: GpuClass
    count: int
    memory_gib: float
    """Of one, as NVML tells it; the smallest where they differ."""


def detect() -> Detected:
    """The GPUs of this machine; raises PlannerError where there are none, or several kinds."""
    found = _ask_nvml()
    if not found:
        raise PlannerError("--detect: NVML sees no GPU; give --gpu")
    classes = [class_of(name) for name, _ in found]
    kinds = Counter(each.id for each in classes)
    if len(kinds) > 1:
        seen = ", ".join(f"{count} x {name}" for name, count in kinds.items())
        raise PlannerError(f"--detect: found {seen}; a plan is for one kind, give --gpu and --gpus")
    return Detected(classes[0], len(classes), min(memory for _, memory in found) / GIB)


def class_of(name: str) -> GpuClass:
    """The class that NVML's name of a GPU belongs to; raises PlannerError."""
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    for word in _LEFT_OUT:
        plain = plain.replace(word, "")
    # The longest first: `rtx3090ti` is not an `rtx3090`.
    for gpu in sorted(list_gpus(), key=lambda each: -len(_key(each))):
        if gpu.compute_capability is not None and plain.startswith(_key(gpu)):
            return gpu
    known = ", ".join(each.id for each in list_gpus() if each.compute_capability)
    raise PlannerError(
        f"--detect: found {name!r}, which the catalogue does not have; give the nearest of {known} "
        "with --gpu, or write a file of its own (docs/catalogue.md)"
    )


def _key(gpu: GpuClass) -> str:
    return _SHORT.get(gpu.id, gpu.id).replace("-", "")


def _ask_nvml() -> list[tuple[str, int]]:
    """Name and memory in bytes of every GPU that NVML sees."""
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        raise PlannerError(
            "--detect: the package nvidia-ml-py is not installed; run "
            "pip install 'moe-serving[detect]', or give --gpu"
        ) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise PlannerError(f"--detect: NVML does not start ({error}); give --gpu") from error
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [_name_and_memory(pynvml, handle) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def _name_and_memory(nvml: Any, handle: Any) -> tuple[str, int]:
    name = nvml.nvmlDeviceGetName(handle)
    # Older bindings give bytes.
    text = name.decode() if isinstance(name, bytes) else str(name)
    return text, int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
