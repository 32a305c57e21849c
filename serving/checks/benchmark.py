"""How long a check of a checkpoint in 1,000 files takes: `python -m serving.checks.benchmark`.

Owns the files it makes, whose data are holes, and their removal. Prints seconds of
wall clock and of CPU for each run.
"""

from __future__ import annotations

import json
import struct
import tempfile
import time
from pathlib import Path

from serving.checks.checkpoint import CONFIG, INDEX
from serving.checks.run import check

SHARDS, EXPERTS, RUNS = 1000, 32, 5
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
TENSOR_BYTES = 4096 * 4096 * 2


def write_checkpoint(folder: Path) -> int:
    """Write the configuration, the index and the files; returns how many tensors they hold."""
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        names = [
            f"model.layers.{shard}.mlp.experts.{expert}.{name}.weight"
            for expert in range(EXPERTS)
            for name in PROJECTIONS
        ]
        _write_file(folder / file, names)
        weight_map |= dict.fromkeys(names, file)
    (folder / CONFIG).write_text("{}")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return len(weight_map)


def _write_file(path: Path, names: list[str]) -> None:
    header = {
        name: {
            "dtype": "BF16",
            "shape": [4096, 4096],
            "data_offsets": [at * TENSOR_BYTES, (at + 1) * TENSOR_BYTES],
        }
        for at, name in enumerate(names)
    }
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + len(names) * TENSOR_BYTES)


def main() -> None:
    """Make the files, check them a few times, print each time taken."""
    with tempfile.TemporaryDirectory() as folder:
        tensors = write_checkpoint(Path(folder))
        size = tensors * TENSOR_BYTES / 1e12
        print(f"{SHARDS} files, {tensors} tensors, {size:.1f} TB announced")
        for _ in range(RUNS):
            wall, cpu = time.perf_counter(), time.process_time()
            check(folder)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            print(f"{wall:.2f} s, {cpu:.2f} s of CPU time")


if __name__ == "__main__":
    main()
