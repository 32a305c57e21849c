"""The benchmark as a whole: start every target, measure, end them whatever happens.

Owns the order, which peers take part, and the end of every process. Leaves each step to its
own module.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serving.studies.capacity import targets as stages
from serving.studies.capacity.measure import Plan, Reading, run_rounds
from serving.studies.capacity.peers import PeerError, install
from serving.studies.capacity.targets import LABELS, PEERS, Stage
from serving.studies.overhead.study import folder, sigterm_as_exit, stop_all

NEEDED = ("uvicorn", "httptools", "uvloop", "ray")


@dataclass(frozen=True, slots=True)
class Measured:
    """All readings, how they were made, and why a target that was asked for has none."""

    plan: Plan
    readings: tuple[Reading, ...]
    skipped: dict[str, str]


def run_study(
    names: Sequence[str], plan: Plan, report: Callable[[str], None], *, install_peers: bool
) -> Measured:
    """Measure these targets (see `targets.parse_targets`).

    `report` gets a line per step. `install_peers` makes the environments of vllm-router and
    LiteLLM where they are missing; without it, a peer that is missing is skipped. Raises
    ServerError, or ValueError where this environment lacks what serves; every process started
    is ended first.
    """
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ValueError(
            f"{', '.join(missing)} not installed; run pip install 'moe-serving[cpu]' or [gpu]"
        )
    skipped = _missing_peers(names, report, install_peers=install_peers)
    taking_part = [name for name in names if name not in skipped]
    with folder() as place, sigterm_as_exit():
        stage = Stage(taking_part, place)
        try:
            began = time.monotonic()
            report(f"starting {len(stage.everything)} programs")
            stages.start(stage)
            report(f"ready after {time.monotonic() - began:.0f} s")
            readings, failed = run_rounds(stage.targets(), stage.engine, plan, report)
            return Measured(plan, tuple(readings), skipped | failed)
        finally:
            stop_all(stage.everything, report)


def _missing_peers(
    names: Sequence[str], report: Callable[[str], None], *, install_peers: bool
) -> dict[str, str]:
    """Which peers cannot take part, and why."""
    skipped = {}
    for name, peer in PEERS.items():
        if name not in names or peer.installed:
            continue
        reason = f"not in {peer.folder}; --install-peers installs it from PyPI"
        if install_peers:
            report(f"installing {peer.requirement} in {peer.folder}")
            try:
                install(peer)
                continue
            except PeerError as error:
                reason = str(error)
        skipped[name] = reason
        report(f"{LABELS[name]} is left out: {reason}")
    return skipped
