"""The disk fills up under a running stack; its clients notice nothing.

On a stack of its own, whose state, logs and Ray's files are on a small disk in memory.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import UNCOMPILED, Load, RunningStack, own_stack, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk"),
]
DISK_MIB = 1024
STACK: dict[str, Any] = {
    "schema": 1,
    "name": "full-disk",
    "models": [
        {
            "model": "tiny-dense",
            "gpu": "cpu",
            "num_cpus": 0.3,
            "max_model_len": 2048,
            **UNCOMPILED,
            "default_variant": "a",
            "variants": {"a": {}, "b": {"max_num_seqs": 8}},
            "routing": {"split": {"study": "live", "arms": ["a", "b"], "share": 1.0}},
        }
    ],
}


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small disk of its own."""
    place = tmp_path_factory.mktemp("disk")
    options = f"size={DISK_MIB}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture(scope="module")
def stack(disk: Path) -> Iterator[RunningStack]:
    with own_stack(disk, STACK, {"TMPDIR": str(disk)}) as running:
        yield running


def fill(place: Path) -> Path:
    """A file that takes all the room there is."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (2**20, 2**10, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue
    return filler


def test_a_full_disk_costs_records_and_no_request(stack: RunningStack, disk: Path) -> None:
    assert stack.answers("tiny-dense")
    filler = fill(disk)
    with pytest.raises(OSError, match="No space left"):
        (disk / "more").write_bytes(b"\0" * 10_000)
    loads = [Load(stack.url, "tiny-dense", streams) for streams in (True, False)]
    with loads[0], loads[1]:
        wait_until(lambda: min(len(x.outcomes) for x in loads) >= 100, 300, "requests go on")
    assert {outcome for load in loads for outcome in load.outcomes} == {"200"}
    lost = stack.metric("moe_serving_split_records_total", outcome="failed")
    assert lost > 0

    filler.unlink()
    assert stack.answers("tiny-dense")
    assert stack.http.get("/readyz").status_code == 200
