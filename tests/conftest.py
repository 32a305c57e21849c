"""What every test shares: the folder decides which tests need the real stack.

Tests under tests/integration get the `integration` marker and a longer time-out, so that
`make test-unit` can leave them out and none can forget to say so. They share one running
stack, so the files that change it come after those that only use it. Fixtures live beside
the tests that use them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

INTEGRATION = Path(__file__).parent / "integration"
INTEGRATION_TIMEOUT_SECONDS = 600
# In this order, after all others of the folder.
CHANGING_THE_STACK = ("test_updates.py", "test_faults.py")


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
    if item.path.parent == INTEGRATION and item.path.name in CHANGING_THE_STACK:
        return CHANGING_THE_STACK.index(item.path.name) + 1
    return 0
