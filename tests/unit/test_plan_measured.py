"""From measured links to a network: what was measured stands, the rest is filled in as documented."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_p2p.ids import PeerId
from fusion_p2p.plan.measured import FASTEST_BYTES_PER_S, UNKNOWN_BYTES_PER_S, UNKNOWN_LATENCY_S, LinkFigures, network_of
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.request import PeerCapability

MBIT = 1e6 / 8
OWNER = PeerId("owner")


def peer(name: str, **known: object) -> PeerCapability:
    return PeerCapability(PeerId(name), 8 << 30, 1e12, **known)  # type: ignore[arg-type]


def network(
    peers: list[PeerCapability], links: Mapping[tuple[str, str], tuple[float, float]], owner: PeerId | None = None
) -> Network:
    """Links as (ms, Mbit/s)."""
    figures = {
        (PeerId(a), PeerId(b)): LinkFigures(latency_ms / 1e3, mbit * MBIT) for (a, b), (latency_ms, mbit) in links.items()
    }
    return network_of(peers, figures, owner)


def mbit(seconds_per_byte: float) -> float:
    return pytest.approx(1 / seconds_per_byte / MBIT, rel=1e-9)  # type: ignore[return-value]


def test_what_is_measured_stands_in_both_directions() -> None:
    made = network([peer("a"), peer("b")], {("a", "b"): (30, 8), ("b", "a"): (20, 80)})
    assert made.alpha_s.tolist() == [[0, 0.03], [0.02, 0]]
    assert (mbit(made.beta_s[0, 1]), mbit(made.beta_s[1, 0])) == (8, 80)
    assert made.sites.tolist() == [0, 1]
    assert made.full_duplex


def test_a_missing_pair_is_as_slow_as_the_slower_end_and_as_far_as_both_usually_are() -> None:
    links = {("a", "b"): (10, 8), ("b", "a"): (10, 50), ("b", "c"): (30, 100), ("c", "b"): (30, 20)}
    made = network([peer("a"), peer("b"), peer("c")], links)
    assert made.alpha_s[0, 2] == pytest.approx(0.02)
    assert mbit(made.beta_s[0, 2]) == 8, "what a sends at best"
    assert mbit(made.beta_s[2, 0]) == 20, "what c sends at best: a was seen to take 50"


def test_announced_rates_and_caps_count_where_nothing_was_measured() -> None:
    peers = [peer("a", up_bytes_per_s=40 * MBIT, up_cap=10 * MBIT), peer("b", down_bytes_per_s=90 * MBIT), peer("c")]
    made = network(peers, {})
    assert mbit(made.beta_s[0, 1]) == 10
    assert (made.alpha_s[~np.eye(3, dtype=bool)] == UNKNOWN_LATENCY_S).all()
    assert mbit(made.uplink_s[0]) == 10
    assert made.uplink_s[2] == 0, "nobody knows: no limit"
    assert 1 / network([peer("a"), peer("b")], {}).beta_s[0, 1] == pytest.approx(UNKNOWN_BYTES_PER_S)


@pytest.mark.row(21)
def test_caps_hold_where_a_link_was_measured_to_carry_more() -> None:
    links = {(x, y): (5.0, 100.0) for x in "abc" for y in "abc" if x != y}
    made = network([peer("a", up_cap=10 * MBIT), peer("b", down_cap=20 * MBIT), peer("c")], links)
    assert mbit(made.beta_s[0, 1]) == 10, "a sends no more"
    assert mbit(made.beta_s[2, 1]) == 20, "b receives no more"
    assert mbit(made.beta_s[1, 2]) == 100
    assert mbit(made.beta_s[1, 0]) == 100
    assert mbit(made.uplink_s[0]) == 10


def test_one_known_direction_serves_the_other_when_no_rates_are_known() -> None:
    made = network([peer("a"), peer("b")], {("a", "b"): (15, 30)})
    assert made.alpha_s[1, 0] == 0.015
    assert mbit(made.beta_s[1, 0]) == 30


def test_fast_and_close_peers_are_a_site_whose_members_have_lines_of_their_own() -> None:
    lan = {(x, y): (0.2, 940.0) for x in "abc" for y in "abc" if x != y and {x, y} != {"a", "c"}}
    wan = {("a", "d"): (20.0, 30.0), ("d", "a"): (20.0, 90.0), ("b", "d"): (20.0, 10.0)}
    made = network([peer(name) for name in "abcd"], lan | wan)
    assert made.sites.tolist() == [0, 0, 0, 1]
    assert mbit(made.beta_s[0, 2]) == 940, "unmeasured inside: what is usual there"
    assert mbit(made.uplink_s[1]) == 90
    assert made.uplink_s[0] == 0, "c's line is unknown"
    assert mbit(made.downlink_s[1]) == 30, "d was seen to take 30"
    assert mbit(made.beta_s[2, 3]) == 30, "c's own rate is unknown: what its site's usual peer sends"


def test_near_but_slow_is_no_site_whatever_the_addresses_say() -> None:
    peers = [peer(name, public_host="203.0.113.9") for name in "abc"]
    slow = {("a", "b"): (0.2, 100.0), ("b", "a"): (0.2, 100.0)}
    assert network(peers, {}).sites.tolist() == [0, 0, 0]
    assert network(peers[:2], slow).sites.tolist() == [0, 1]
    assert network(peers, slow).sites.tolist() == [0, 1, 2], "c is not their bridge"
    strangers = [peer("a", local_network="192.168.1", public_host="198.51.100.1"), peer("b", local_network="192.168.1")]
    assert network(strangers, {}).sites.tolist() == [0, 1], "every second home has this network"


def test_peers_of_one_public_host_share_its_line() -> None:
    peers = [peer(name, public_host="203.0.113.9", up_bytes_per_s=rate * MBIT) for name, rate in (("a", 20), ("b", 40))]
    assert mbit(network(peers, {}).uplink_s[0]) == 40


def test_peers_behind_a_relay_share_its_rate() -> None:
    peers = [peer("a", relay="r"), peer("b", relay="r"), peer("c"), peer("d", relay="q")]
    links = {("a", "c"): (40.0, 16.0), ("b", "c"): (40.0, 12.0), ("c", "a"): (40.0, 20.0), ("d", "c"): (9.0, 50.0)}
    made = network(peers, links)
    assert made.sites.tolist() == [0, 0, 1, 2]
    assert mbit(made.uplink_s[0]) == 16
    assert mbit(made.downlink_s[0]) == 20


def test_the_owner_is_the_last_node_with_links_of_its_own() -> None:
    made = network([peer("a"), peer("b")], {("owner", "a"): (5, 12), ("a", "owner"): (5, 70), ("b", "a"): (5, 44)}, OWNER)
    assert made.owner == 2
    assert mbit(made.beta_s[2, 0]) == 12
    assert mbit(made.beta_s[2, 1]) == 12, "what the owner sends at best"
    assert made.peers == (PeerId("a"), PeerId("b"))


def test_a_peer_that_claims_to_be_close_to_all_joins_no_two_that_are_far() -> None:
    far = {(x, y): (50.0, 8.0) for x in "abc" for y in "abc" if x != y}
    claimed = {pair: (0.0, 8e6) for x in "abc" for pair in ((x, "m"), ("m", x))}
    peers = [peer(name) for name in "abcm"]
    sites = network(peers, far | claimed).sites
    assert len(set(sites[:3].tolist())) == 3
    alone = {pair: figures for pair, figures in far.items() if set(pair) != {"a", "b"}}
    figures = {
        (PeerId(x), PeerId(y)): LinkFigures(ms / 1e3, rate * MBIT, by_both="m" not in (x, y))
        for (x, y), (ms, rate) in (alone | claimed).items()
    }
    made = network_of(peers, figures)
    assert len(set(made.sites.tolist())) == 4, "nobody but m says so"
    assert mbit(made.beta_s[0, 1]) == 8, "m's word is not what a and b are like"
    assert made.alpha_s[0, 1] >= 0.02
    assert 1 / made.beta_s[0, 3] == pytest.approx(FASTEST_BYTES_PER_S)


def test_a_bridge_between_two_sites_takes_neither_of_them_apart() -> None:
    inside = {(x, y): (0.3, 900.0) for group in ("abc", "def") for x in group for y in group if x != y}
    between = {pair: (20.0, 50.0) for x in "abc" for y in "def" for pair in ((x, y), (y, x))}
    bridge = {pair: (0.1, 5000.0) for x in "ad" for pair in ((x, "m"), ("m", x))}
    sites = network([peer(name) for name in "mabcdef"], inside | between | bridge).sites.tolist()
    assert sites[1] == sites[2] == sites[3] != sites[4] == sites[5] == sites[6]


def test_the_owner_is_believed_about_its_own_links() -> None:
    close = {pair: LinkFigures(0.0002, 900 * MBIT, by_both=False) for pair in ((OWNER, PeerId("a")), (PeerId("a"), OWNER))}
    assert network_of([peer("a"), peer("b")], close, OWNER).sites.tolist() == [0, 1, 0]
    assert network_of([peer("a"), PeerCapability(OWNER, 1, 1.0)], close).sites.tolist() == [0, 1], "a peer is not"


def test_rates_of_every_kind_are_kept() -> None:
    made = network([peer("a", convolution_flops_per_s=2e12, memory_bytes_per_s=3e11), peer("b")], {})
    assert made.flops_per_s.tolist() == [[1e12, 2e12, 1e12], [1e12, 1e12, 1e12]]
    assert made.memory_bytes_per_s.tolist() == [3e11, np.inf]


_FIGURES = st.builds(LinkFigures, st.none() | st.floats(0, 1), st.none() | st.floats(0, 1e10))
_NAMES = st.sampled_from([PeerId(name) for name in "abcdef"] + [OWNER])
_PLACES = st.sampled_from(["", "here", "there"])
_RATES = st.none() | st.floats(0, 1e10)
_PEERS = st.lists(
    st.builds(
        PeerCapability, _NAMES.filter(lambda name: name != OWNER), st.just(1), st.just(1.0), up_bytes_per_s=_RATES,
        down_bytes_per_s=_RATES, up_cap=_RATES, public_host=_PLACES, local_network=_PLACES, relay=_PLACES,
    ), max_size=6, unique_by=lambda one: one.peer,
)  # fmt: skip


@given(_PEERS, st.dictionaries(st.tuples(_NAMES, _NAMES), _FIGURES, max_size=30), st.booleans())
def test_whatever_is_known_the_network_is_whole(
    peers: list[PeerCapability], links: dict[tuple[PeerId, PeerId], LinkFigures], owned: bool
) -> None:
    made = network_of(peers, links, OWNER if owned else None)
    count = len(peers) + owned
    assert made.alpha_s.shape == made.beta_s.shape == (count, count)
    assert np.isfinite(made.alpha_s).all()
    assert (made.alpha_s >= 0).all()
    assert np.isfinite(made.beta_s).all()
    assert ((made.beta_s > 0) ^ np.eye(count, dtype=bool)).all()
    assert len(made.sites) == count
    for limits in (made.uplink_s, made.downlink_s):
        assert len(limits) == len(set(made.sites.tolist()))
        assert np.isfinite(limits).all()
    for index, one in enumerate(peers):
        for other, two in enumerate(peers):
            figures = links.get((one.peer, two.peer))
            if index != other and figures is not None and figures.latency_s is not None:
                assert made.alpha_s[index, other] == figures.latency_s
