"""Finding processes by a mark in their environment, and the shared memory that they map."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import psutil

# Python's own name for a block; one that is freed already shows as `(deleted)`.
SHARED_MEMORY = "/dev/shm/psm_"


def marked(variable: str, value: str) -> list[psutil.Process]:
    """Every other living process whose environment has `variable` set to `value`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(variable) == value:
                found.append(process)
    return found


def shared_memory(processes: Iterable[psutil.Process]) -> frozenset[Path]:
    """Blocks of shared memory that these processes have mapped (vLLM's, between its processes)."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
            found |= {word for word in maps.split() if word.startswith(SHARED_MEMORY)}
    return frozenset(map(Path, found))
