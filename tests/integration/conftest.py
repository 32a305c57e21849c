"""One stack for the whole test session, and the clients that speak to it."""

from __future__ import annotations

import subprocess
from collections.abc import Generator, Iterator

import pytest
from anthropic import Anthropic
from openai import OpenAI

from serving.stack.runtime import HOME_VARIABLE
from tests.conftest import CHANGING_THE_STACK
from tests.integration.harness import VARIANTS, RunningStack, wait_until


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """tiny-moe (mtp and plain) and tiny-dense, started with `moe-serving up`."""
    running = RunningStack(tmp_path_factory.mktemp("stack"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOME_VARIABLE, str(running.home))
        with running.ended_whatever_happens():
            _start(running)
            yield running
        down = (running.home / "down.log").read_text()
        assert running.processes() == [], f"left by `moe-serving down`:\n{down}"


def _start(running: RunningStack) -> None:
    try:
        result = running.up(running.file, "--port", str(running.port))
    except subprocess.TimeoutExpired as expired:
        pytest.fail(f"{expired}\n{expired.output}\n{running.log_tail()}", pytrace=False)
    if result.returncode != 0:
        pytest.fail(f"up failed:\n{result.stdout}\n{running.log_tail()}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails is shown with what the stack itself had to say."""
    report = yield
    running = getattr(item, "funcargs", {}).get("stack")
    if report.when == "call" and report.failed and isinstance(running, RunningStack):
        report.sections.append(("Serve's warnings", running.serve_warnings()))
    return report


@pytest.fixture(autouse=True)
def _leases_released(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did, no slot of an engine stays taken."""
    yield
    # Of the two, one loses requests and the other's counters want a key.
    elsewhere = request.path.name in ("test_faults.py", "test_teams.py")
    if "stack" not in request.fixturenames or elsewhere:
        return
    running: RunningStack = request.getfixturevalue("stack")
    wait_until(lambda: running.leases() == 0, 10, "every lease is released")
    none = dict.fromkeys(VARIANTS, 0.0)
    # In the others engines come and go, and a stack of a test's own has engines of its own.
    if request.path.name not in CHANGING_THE_STACK and running.readiness().keys() == none.keys():
        wait_until(lambda: running.replica_leases() == none, 15, "no replica holds a slot")


@pytest.fixture
def openai_client(stack: RunningStack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=90) as client:
        yield client


@pytest.fixture
def anthropic_client(stack: RunningStack) -> Iterator[Anthropic]:
    with Anthropic(base_url=stack.url, api_key="none", max_retries=0, timeout=90) as client:
        yield client
