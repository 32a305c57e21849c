"""What the planner's tests share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from serving.studies.records import Arm, RequestRecord, StudyRecord, append_request, write_study


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes the folder of a study with these requests, and returns it."""
    return partial(_write_run, tmp_path / "run")


def _write_run(folder: Path, *records: dict[str, Any]) -> Path:
    folder.mkdir()
    arms = tuple(Arm(name=f"n={n}", url="http://a/v1", model="m", draft_tokens=n) for n in (0, 2))
    write_study(
        folder,
        StudyRecord(
            schema=1,
            id="sweep-1",
            name="sweep",
            question="Which n?",
            arms=arms,
            plain="n=0",
            gpu="cpu",
            environment={},
            spec={},
            started_at=0,
        ),
    )
    for number, each in enumerate(records):
        given = {
            "cell": str(number),
            "round": 0,
            "arm": f"n={each.get('draft_tokens', 0)}",
            "streams": 1,
            "category": "code",
            "prompt": "p",
            "temperature": 0.0,
            "max_tokens": 64,
            "sent_at": 0.0,
            "outcome": "ok",
        }
        append_request(folder, RequestRecord(**given | each))
    return folder
