"""An emulated network really has the rates and latencies that it was given, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from contrib.processes import processes_of
from contrib.testbeds.emulation import EmulatedNetwork, emulated_network
from contrib.testbeds.namespaces import set_wire, why_not
from contrib.testbeds.shaping import Shape

pytestmark = [
    pytest.mark.process,
    pytest.mark.alone,
    pytest.mark.root,
    pytest.mark.skipif(why_not() is not None, reason=f"no emulated network here: {why_not()}"),
]
MBIT = 8e-6
"""Seconds per byte of one Mbit/s."""
SHAPE = Shape(
    addresses=("10.77.1.1", "10.77.2.2"),
    sites=(0, 1),
    latency_s=((0.0, 0.02), (0.02, 0.0)),
    seconds_per_byte=((0.0, MBIT / 8), (MBIT / 100, 0.0)),
    uplink_s=(0.0, 0.0),
    downlink_s=(0.0, 0.0),
)


def test_links_have_the_rates_and_latencies_they_were_given(tmp_path: Path):
    with emulated_network(SHAPE, tmp_path) as network:
        session, namespace = network.links.session, Path(network.namespaces["10.77.1.1"])
        slow, fast = network.measure(0, 1), network.measure(1, 0)
        assert namespace.exists()
    assert slow.bytes_per_s == pytest.approx(8e6 / 8, rel=0.1)
    assert fast.bytes_per_s == pytest.approx(100e6 / 8, rel=0.1)
    assert [slow.latency_s, fast.latency_s] == pytest.approx([0.02, 0.02], rel=0.2)
    assert processes_of([session]) == []
    assert not namespace.exists()


def test_a_wire_that_is_taken_down_carries_nothing_until_it_is_up_again(tmp_path: Path):
    def routes(network: EmulatedNetwork) -> list[str]:
        with network.start("routes", 0, ["cat", "/proc/self/net/route"]) as asking:
            assert asking.wait(10.0) == 0
        return [line for line in asking.lines if line.startswith("links")]

    with emulated_network(SHAPE, tmp_path) as network:
        whole = routes(network)
        assert whole
        set_wire(network.namespaces["10.77.1.1"], up=False)
        assert routes(network) == []
        assert network.links.process.poll() is None
        set_wire(network.namespaces["10.77.1.1"], up=True)
        assert routes(network) == whole
        assert network.measure(0, 1, 0.2).latency_s == pytest.approx(0.02, rel=0.2)
