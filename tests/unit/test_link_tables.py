"""Where peers are by their addresses, and what a plan may count on by their announcements."""

from __future__ import annotations

import pytest

from fusion_p2p.ids import PeerId
from fusion_p2p.peer.link_tables import announced_links, capability_of, place_of, same_place, tables_of
from fusion_p2p.swarm.announcement import Caps, Line, LinkFigure, announce
from fusion_p2p.wire.swarm_messages import LinkEntry, Links
from tests.protocol.swarm_world import PROFILE

ME = "/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
RELAY = f"/ip4/198.51.100.4/tcp/4001{ME}"


@pytest.mark.parametrize(
    ("addresses", "place"),
    [
        (["/ip4/8.8.8.8/tcp/1" + ME, "/ip4/192.168.1.5/tcp/1" + ME], ("8.8.8.8", "", "")),
        (["/ip4/192.168.1.5/tcp/1" + ME], ("", "192.168.1.0/24", "")),
        ([f"{RELAY}/p2p-circuit{ME}", "/ip4/192.168.1.5/tcp/1" + ME], ("", "", RELAY)),
        (["/ip6/fd00::12/tcp/1" + ME], ("", "fd00::/64", "")),
        (["/dns4/home.example.org/tcp/1" + ME], ("home.example.org", "", "")),
        (["/ip4/127.0.0.1/tcp/1" + ME], ("", "127.0.0.0/24", "")),
        (["nonsense", "/ip4/none/tcp/1", "/ip4"], ("", "", "")),
        ([], ("", "", "")),
    ],
)
def test_where_a_peer_is(addresses: list[str], place: tuple[str, str, str]) -> None:
    assert place_of(addresses) == place


def test_two_homes_with_the_same_private_network_are_not_one_place() -> None:
    home = ["/ip4/8.8.8.8/tcp/1" + ME, "/ip4/192.168.1.5/tcp/1" + ME]
    other = ["/ip4/9.9.9.9/tcp/1" + ME, "/ip4/192.168.1.6/tcp/1" + ME]
    assert not same_place(home, other)
    assert same_place(home, [home[0]])
    assert same_place([home[1]], [other[1]])
    assert not same_place([], [])


def test_an_announcement_says_what_a_plan_may_count_on() -> None:
    link = LinkFigure(peer="b", latency_s=0.02, out=1e6, back=5e6)
    profile = PROFILE.model_copy(
        update={
            "line": Line(up_bytes_per_s=1e6, down_bytes_per_s=None, links=(link,)),
            "caps": Caps(upload_bytes_per_s=5e5),
            "rates": PROFILE.rates.model_copy(update={"convolution_flops": 2e10, "memory_bytes_per_s": 0.0}),
        }
    )
    said = announce(profile, ["/ip4/192.168.1.5/tcp/1" + ME], "standby", 1, 1.0)
    made = capability_of(PeerId("a"), said)
    assert (made.flops_per_s, made.convolution_flops_per_s, made.memory_bytes_per_s) == (1e10, 2e10, None)
    assert (made.up_bytes_per_s, made.down_bytes_per_s, made.up_cap, made.down_cap) == (1e6, None, 5e5, None)
    assert made.local_network == "192.168.1.0/24"
    assert [entry.out_bytes_per_s for entry in announced_links(said)] == [1e6]
    told = LinkEntry(peer="b", latency_s=0.03, out_bytes_per_s=2e6, in_bytes_per_s=2e6, age_s=1.0, in_age_s=1.0)
    assert tables_of({PeerId("a"): said}, {}) == {"a": announced_links(said)}
    assert tables_of({PeerId("a"): said}, {PeerId("a"): Links(entries=(told,), measuring=False)}) == {"a": (told,)}
