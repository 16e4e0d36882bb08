from __future__ import annotations

import urllib.request

import pytest

from fusion_p2p.errors import ConfigError
from fusion_p2p.job.progress import PeerSample
from fusion_p2p.monitor.metrics_page import MetricsPage


def test_the_newest_numbers_are_served_on_loopback():
    page = MetricsPage(0)
    try:
        page.show(PeerSample(slices=1, progress=2, bytes_received=3, members=4, coordinating=False))
        page.show(PeerSample(slices=2, progress=1 << 20, bytes_received=3, members=4, coordinating=True))
        with urllib.request.urlopen(f"http://127.0.0.1:{page.port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
    finally:
        page.close()
    assert "fusion_peer_slices 2.0" in lines
    assert "fusion_peer_progress 1.048576e+06" in lines
    assert "fusion_peer_coordinating 1.0" in lines


@pytest.mark.row(9)
def test_a_taken_port_is_named():
    page = MetricsPage(0)
    try:
        with pytest.raises(ConfigError, match=f"metrics_port {page.port} cannot be used"):
            MetricsPage(page.port)
    finally:
        page.close()
