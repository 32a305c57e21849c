"""Fits the four fitted constants to an anchors file, and shows how firm they are.

    python -m serving.planner.fit [ANCHORS.json]

Owns the fit: one constant at a time, over a grid, the mean absolute logarithm of
predicted over published plain speed and speed-up, each row's part bounded so that no
single row pulls. Leaves the values in force to `constants`: what this prints is
compared with them, not used.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from serving.planner.anchors import Prediction, predict_row, shipped_anchors
from serving.planner.constants import (
    CONSTANTS,
    LLAMA_CPP,
    VLLM,
    Constants,
    EngineFamily,
    find_family,
    with_step,
)

# A row further off than this counts as if it were this far off: exp(0.4) is 1.5.
BOUND = 0.4
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Fitted:
    """The constants that are fitted, and the values tried for each."""

    bandwidth_fraction: float = CONSTANTS.bandwidth_fraction
    expert_layer_s: float = CONSTANTS.expert_layer_s
    vector_fraction: float = LLAMA_CPP.vector_fraction or 0.0
    vllm_step_s: float = VLLM.step_s


GRID: dict[str, tuple[float, ...]] = {
    "bandwidth_fraction": tuple(0.60 + 0.02 * i for i in range(20)),
    "expert_layer_s": tuple(10e-6 * i for i in range(1, 16)),
    "vector_fraction": tuple(0.15 + 0.025 * i for i in range(25)),
    "vllm_step_s": tuple(0.25e-3 * i for i in range(2, 25)),
}


def loss(rows: Sequence[dict[str, Any]], fitted: Fitted) -> float:
    """Mean of |ln(predicted / published)| over the rows' plain speeds and speed-ups."""
    constants, resolve = _apply(fitted)
    errors = []
    for row in rows:
        found = predict_row(row, constants=constants, resolve=resolve)
        if isinstance(found, Prediction):
            errors += [
                each for each in (found.plain_error, found.speedup_error) if each is not None
            ]
    return statistics.mean(min(abs(math.log1p(error)), BOUND) for error in errors)


def fit(rows: Sequence[dict[str, Any]]) -> Fitted:
    """The values of the grid with the least loss, found one constant after the other."""
    best = Fitted()
    for _ in range(ROUNDS):
        for name, values in GRID.items():
            tried = [replace(best, **{name: value}) for value in values]
            best = min(tried, key=lambda each: loss(rows, each))
    return best


def leave_one_out(rows: Sequence[dict[str, Any]]) -> list[Fitted]:
    """The fit without each row in turn."""
    return [fit([*rows[:i], *rows[i + 1 :]]) for i in range(len(rows))]


def _apply(fitted: Fitted) -> tuple[Constants, Callable[[str], EngineFamily]]:
    constants = replace(
        CONSTANTS,
        bandwidth_fraction=fitted.bandwidth_fraction,
        expert_layer_s=fitted.expert_layer_s,
    )
    llama = replace(
        LLAMA_CPP,
        vector_fraction=fitted.vector_fraction,
        expert_token_s=fitted.expert_layer_s / 2,
    )
    families = {LLAMA_CPP.name: llama, VLLM.name: with_step(VLLM, fitted.vllm_step_s)}
    return constants, lambda engine: families[find_family(engine).name]


def main(arguments: Sequence[str]) -> None:
    """Print the fit, the values in force and the range when any one row is left out."""
    file = Path(arguments[0]) if arguments else shipped_anchors()
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    best, without_one = fit(rows), leave_one_out(rows)
    print(f"loss in force {loss(rows, Fitted()):.4f}, fitted {loss(rows, best):.4f}")
    for name in GRID:
        left = sorted(getattr(each, name) for each in without_one)
        print(
            f"{name}: in force {getattr(Fitted(), name):.3g}, fitted {getattr(best, name):.3g}, "
            f"without any one row {left[0]:.3g} to {left[-1]:.3g}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
