"""What every test shares: the folder decides which tests need the real stack.

Tests under tests/integration get the `integration` marker and a longer time-out, so that
`make test-unit` can leave them out and none can forget to say so. They come last, so that the
stack they share has the machine to itself, and of them the files that change that stack come
after those that only use it. Fixtures live beside the tests that use them.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

INTEGRATION = Path(__file__).parent / "integration"
INTEGRATION_TIMEOUT_SECONDS = 600
# In this order, after all others.
CHANGING_THE_STACK = (
    "test_live_routing.py",
    "test_updates.py",
    "test_teams.py",
    "test_replicas.py",
    "test_faults.py",
)


# What rich prints does not depend on the terminal that the tests run in.
os.environ["COLUMNS"] = "120"

# A shell has what it runs in the background ignore Ctrl-C, and what tests start would, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if INTEGRATION not in item.path.parents:
            continue
        item.add_marker(pytest.mark.integration)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(INTEGRATION_TIMEOUT_SECONDS))
    # The sort keeps the order of what compares equal.
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    if item.path.parent != INTEGRATION:
        return 0
    if item.path.name not in CHANGING_THE_STACK:
        return 1
    return 2 + CHANGING_THE_STACK.index(item.path.name)
