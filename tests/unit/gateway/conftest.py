"""The fixture that every test of the gateway's app starts from."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.unit.gateway.harness import Stack, running_stack


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as running:
        yield running
