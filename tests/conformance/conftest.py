"""Each test of the suite runs once per implementation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.conformance.harness import Harness, hivemind, memory


@pytest_asyncio.fixture(params=["memory", "hivemind", "relay"])
async def harness(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    if request.param == "memory":
        async with memory() as simulated:
            yield simulated
    else:
        relay = request.getfixturevalue("relay_address") if request.param == "relay" else None
        async with hivemind(tmp_path, relay) as real:
            yield real
