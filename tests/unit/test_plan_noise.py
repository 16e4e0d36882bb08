"""What measuring alone can make of equal peers is taken out of a network; what really differs stays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fusion_p2p.plan.noise import evened
from tests.unit.networks import network


def rates(*speeds: float) -> list[float]:
    """Matrix-product rates of peers that were measured at these speeds, evened."""
    made = evened(network([0] * len(speeds), speeds=speeds)).flops_per_s[:, 0]
    return [float(rate) for rate in made]


def test_equal_peers_are_equal_and_others_are_not() -> None:
    assert rates(1.0, 1.1, 0.95, 1.05, 8.0) == [1.0, 1.0, 1.0, 1.0, 8.0]
    assert rates(1.0, 1.5) == [1.0, 1.5]
    assert rates(3.0) == [3.0]


def test_peers_in_between_do_not_make_a_slow_one_as_fast_as_a_fast_one() -> None:
    slow, *_, fast = rates(1.0, 1.2, 1.44, 1.73, 2.07)
    assert fast / slow > 1.6


def test_links_that_differ_by_little_are_equal_and_slow_ones_stay_slow() -> None:
    net = network([0, 0, 1], within=(2e-4, 1e-8), between=(0.03, 1e-6))
    beta = net.beta_s * np.array([[1.0, 1.4, 0.8], [0.7, 1.0, 1.3], [1.2, 0.9, 1.0]])
    made = evened(replace(net, beta_s=beta, alpha_s=net.alpha_s * beta / np.where(net.beta_s, net.beta_s, 1.0)))
    assert np.unique(made.beta_s[made.sites[:, None] != made.sites]).size == 1
    assert not made.beta_s.diagonal().any()
    assert not made.alpha_s.diagonal().any()
    assert made.beta_s[0, 1] == made.beta_s[1, 0] < made.beta_s[0, 2] / 50
    assert made.alpha_s[0, 1] < 1e-3 < 0.02 < made.alpha_s[0, 2]


def test_unknown_memory_bandwidth_stays_unknown() -> None:
    assert np.isinf(evened(network([0, 0])).memory_bytes_per_s).all()
