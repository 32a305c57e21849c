"""Serve's states and messages in a user's words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="Serve's own values are read")

from serving.stack import watch
from serving.stack.events import Step
from serving.stack.watch import message_of, replicas_of, shorten, starting_for_s, step_of


def application(
    status: str,
    replicas: list[tuple[str, int | None]],
    wanted: int = 1,
    trigger: str = "REPLICA_STARTUP_FAILED",
) -> Any:
    """An application as Serve describes it; replicas by state and process id."""
    # Replica n began at second n.
    found = [
        SimpleNamespace(state=SimpleNamespace(value=s), pid=pid, start_time_s=float(number))
        for number, (s, pid) in enumerate(replicas)
    ]
    deployment = SimpleNamespace(
        status=SimpleNamespace(value=status),
        status_trigger=SimpleNamespace(value=trigger),
        replicas=found,
        target_num_replicas=wanted,
        message="",
    )
    return SimpleNamespace(
        status=SimpleNamespace(value=status), deployments={"d": deployment}, message="as a whole"
    )


@pytest.mark.parametrize(
    ("known", "waits", "expected"),
    [
        (None, False, ("starting process", "")),
        (application("DEPLOYING", []), False, ("starting process", "")),
        (application("DEPLOYING", [("STARTING", None)]), True, ("waiting for resources", "")),
        (application("DEPLOYING", [("STARTING", None)]), False, ("starting process", "")),
        (application("DEPLOYING", [("STARTING", 7)]), False, ("loading", "")),
        (
            application("DEPLOYING", [("RUNNING", 7), ("STARTING", 8)], wanted=2),
            False,
            ("loading", "1 of 2 replicas"),
        ),
        (application("RUNNING", [("RUNNING", 7)]), False, ("ready", "")),
        (application("RUNNING", [("RUNNING", 7), ("STARTING", 8)], 2), False, ("ready", "")),
        (application("RUNNING", [], wanted=0), False, ("idle", "")),
        (application("RUNNING", [("STOPPING", 7)], wanted=0), False, ("idle", "")),
        (application("RUNNING", [("STARTING", None)]), True, ("waiting for resources", "")),
        (application("RUNNING", [("STARTING", 7)]), False, ("loading", "")),
        (application("DEPLOY_FAILED", []), False, ("failed", "")),
        (application("UNHEALTHY", []), False, ("failed", "")),
        (
            application("UNHEALTHY", [("RUNNING", 7), ("STARTING", 8)], 2, "HEALTH_CHECK_FAILED"),
            False,
            ("loading", "1 of 2 replicas"),
        ),
    ],
)
def test_the_step_follows_from_serve_s_states(
    known: Any, waits: bool, expected: tuple[str, str]
) -> None:
    assert step_of(known, waits=waits) == expected


def test_replicas_are_counted_as_running_and_wanted() -> None:
    assert replicas_of(application("DEPLOYING", [("RUNNING", 7), ("STARTING", 8)], 3)) == (1, 3)


def test_a_start_is_timed_by_the_first_of_the_replicas_that_start() -> None:
    states: list[tuple[str, int | None]] = [
        ("RUNNING", 7),
        ("STOPPING", 8),
        ("STARTING", 9),
        ("STARTING", None),
    ]
    assert starting_for_s(application("RUNNING", states, 3), now=14.0) == 12.0
    assert starting_for_s(application("RUNNING", states[:2]), now=14.0) is None


def test_a_start_that_waits_only_for_idle_engines_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "a": application("RUNNING", [], wanted=0),
        "b": application("RUNNING", [("RUNNING", 1)]),
    }
    monkeypatch.setattr(watch, "applications", lambda: known)
    monkeypatch.setattr(watch, "unplaced", list)
    steps: list[Step] = []
    watch.wait_until_running({"a": "m@a", "b": "m@b"}, steps.append)
    assert [(step.name, step.step) for step in steps] == [("m@a", "idle"), ("m@b", "ready")]


def test_of_a_trace_only_its_last_exception_is_told() -> None:
    text = (
        "The deployment failed to start 1 times in a row. Error:\n"
        "\x1b[36mray::ServeReplica:engine\x1b[39m (pid=1)\n  File 'a.py', line 1\n"
        "RuntimeError: Traceback (most recent call last):\n  File 'b.py', line 2\n"
        "    raise ValueError\n"
        "pydantic_core._pydantic_core.ValidationError: 1 validation error\n  too long\n"
    )
    assert shorten(text) == (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error\n  too long"
    )


def test_a_message_without_a_trace_is_cut_to_its_end() -> None:
    assert shorten("\n".join(map(str, range(100)))) == "\n".join(map(str, range(92, 100)))
    assert message_of(application("UNHEALTHY", [])) == "as a whole"
