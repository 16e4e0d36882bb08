"""Each test of the suite runs once per implementation."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.conformance.harness import Harness, hivemind, memory


@pytest.fixture(scope="session")
def relay_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A circuit relay in a process of its own, which ends with its standard input."""
    key = tmp_path_factory.mktemp("relay") / "key"
    arguments = [sys.executable, "-m", "fusion_p2p.relay", "--listen", "/ip4/127.0.0.1/tcp/0", "--identity", str(key)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["addresses"][0]
        process.communicate(timeout=10)


@pytest_asyncio.fixture(params=["memory", "hivemind", "relay"])
async def harness(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    if request.param == "memory":
        async with memory() as simulated:
            yield simulated
    else:
        relay = request.getfixturevalue("relay_address") if request.param == "relay" else None
        async with hivemind(tmp_path, relay) as real:
            yield real
