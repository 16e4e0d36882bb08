"""The scheduler `auto`: never slower than another one, within memory, the same every time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.plan.auto import OTHERS, auto
from fusion_p2p.plan.judging import Judge
from fusion_p2p.plan.layout import Layout
from fusion_p2p.plan.memory import within_memory
from fusion_p2p.plan.request import NoPlan, Terms
from tests.unit.planning_cases import random_chain, random_network


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_peers=st.integers(1, 6),
    num_blocks=st.integers(1, 12),
    num_sites=st.integers(0, 3),
    micro_batches=st.sampled_from([1, 4, 9]),
    codec=st.sampled_from(["none", "uniform", "adatopk", "adaptive", "int8"]),
)
def test_never_slower_than_another_scheduler(
    seed: int, num_peers: int, num_blocks: int, num_sites: int, micro_batches: int, codec: str
) -> None:
    chain = random_chain(seed, num_blocks, feed_bytes=1e5)
    network = random_network(seed, num_peers, num_sites=num_sites, has_owner=bool(seed % 2))
    terms = Terms(micro_batches, codec=codec, ratio=20.0)
    found = auto(chain, network, terms)
    judge = Judge(chain, network, terms)
    others = [made for other in OTHERS if isinstance(made := other(chain, network, terms), Layout)]
    if isinstance(found, NoPlan):
        assert not others
        return
    assert isinstance(within_memory(chain, network, found, terms), Layout)
    seconds = judge.offer(found)
    for other in others:
        assert seconds <= Judge(chain, network, terms).offer(other) * (1 + 1e-9)


def test_the_same_twice_and_named() -> None:
    chain, network, terms = random_chain(5, 12), random_network(5, 5, num_sites=2), Terms(8, codec="adatopk")
    found = auto(chain, network, terms)
    assert isinstance(found, Layout)
    assert found == auto(chain, network, terms)
    assert found.scheduler == "auto"
    assert len(found.ratios) == len(found.stages) - 1


def test_leaves_peers_idle_that_would_slow_it_down() -> None:
    chain, network = random_chain(1, 12), random_network(1, 4)
    far = np.where(np.arange(4) == 3, 1e3, 1.0)
    slow = replace(
        network,
        beta_s=network.beta_s * np.maximum(far[:, None], far[None, :]),
        flops_per_s=np.full((4, 3), 1e11),
        free_bytes=np.full(4, 1e12),
    )
    found = auto(chain, slow, Terms(8))
    assert isinstance(found, Layout)
    assert found.peers == {0, 1, 2}


def test_recomputes_where_memory_demands_it() -> None:
    chain, network = random_chain(2, 12), random_network(2, 1)
    chain = replace(chain, saved_bytes=chain.saved_bytes * 20, parameter_bytes=chain.parameter_bytes / 100)
    roomy = replace(network, free_bytes=np.array([1e12]))
    tight = replace(network, free_bytes=np.array([chain.saved_bytes[-1] * 1.5]))
    terms = Terms(4, schedule="gpipe")
    free, lean = auto(chain, roomy, terms), auto(chain, tight, terms)
    assert isinstance(free, Layout)
    assert isinstance(lean, Layout)
    assert (free.recompute, lean.recompute) == (False, True)


def test_replicas_where_links_are_fast() -> None:
    """One stage on many alike peers in one rack, few blocks: copies side by side beat any chain."""
    chain, network = random_chain(3, 2), random_network(3, 4, num_sites=1)
    alike = replace(network, flops_per_s=np.full((4, 3), 1e12), free_bytes=np.full(4, 1e12))
    small = replace(chain, parameter_bytes=chain.parameter_bytes / 1000)
    found = auto(small, alike, Terms(16))
    assert isinstance(found, Layout)
    assert max(len(stage.peers) for stage in found.stages) > 1


def test_nobody_and_nothing_that_fits() -> None:
    chain, network = random_chain(0, 6), random_network(0, 3)
    nobody = auto(chain, network.select([]), Terms(2))
    assert isinstance(nobody, NoPlan)
    assert nobody.reason == "no peer is free"
    nothing = auto(chain, network, Terms(2, moments=500))
    assert isinstance(nothing, NoPlan)
    assert "more" in nothing.reason


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_keeps_to_the_schedule_asked_for(schedule: str) -> None:
    found = auto(random_chain(4, 10), random_network(4, 4), Terms(4, schedule=schedule))
    assert isinstance(found, Layout)
    assert found.schedule == schedule
