"""A home's narrow uplink that values and a download fill: what must not be late is not late (real daemons, real queues)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from contrib.processes import ADDRESS, python_module
from contrib.testbeds.emulation import emulated_network
from contrib.testbeds.namespaces import why_not
from tests.process.test_emulated_network import MBIT, SHAPE

pytestmark = [
    pytest.mark.process,
    pytest.mark.alone,
    pytest.mark.root,
    pytest.mark.skipif(why_not() is not None, reason=f"no emulated network here: {why_not()}"),
]
RATE = 8e6 / 8
SECONDS = 12
QUEUE_S = 2.0
"""A modem that keeps far too much: only who sends little at a time is not late behind it."""


@pytest.mark.row(11)
@pytest.mark.timeout(120)
def test_beats_and_pulses_are_heard_within_a_second_on_a_line_that_is_full(tmp_path: Path) -> None:
    shape = replace(SHAPE, seconds_per_byte=((0.0, MBIT / 8), (MBIT / 100, 0.0)), queue_s=QUEUE_S)
    module = "tests.process.uplink_peer"
    with emulated_network(shape, tmp_path) as network:
        here, there = (f"/ip4/{address}/tcp/0" for address in shape.addresses)
        with network.start("taker", 1, python_module(module, "take", str(tmp_path / "taker.key"), there)) as taker:
            address = taker.wait_for(ADDRESS, 30).group()
            command = python_module(module, "give", str(tmp_path / "giver.key"), here, address, str(SECONDS))
            with network.start("giver", 0, command) as giver:
                assert giver.wait(SECONDS + 40) == 0, giver.tail()
            assert taker.wait(30) == 0, taker.tail()
            figures = json.loads(taker.lines[-1])
    print(figures)
    assert figures["pulses"] >= 0.7 * SECONDS / 0.1
    assert figures["pulse_s"] < 1.0
    assert figures["beat_s"] < 1.0
    assert figures["bytes_per_s"] > 0.8 * RATE
