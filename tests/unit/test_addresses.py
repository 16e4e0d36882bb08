"""Addresses: what is wrong is pointed at; what is right is sorted by reach."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_p2p.errors import AddressError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.addresses import (
    Reach,
    by_reach,
    circuit_address,
    parse_announce_address,
    parse_listen_address,
    parse_peer_address,
    port_of,
    reach,
    reach_warning,
)

PEER = PeerId("12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq")
OTHER = PeerId("12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN")


@pytest.mark.parametrize(
    "dial",
    ["/ip4/192.0.2.7/tcp/31337", "/ip6/2001:db8::7/tcp/1", "/dns4/home.example.org/tcp/65535", "/ip4/192.0.2.7/udp/9/quic-v1"],
)
def test_a_right_address_names_its_peer(dial: str):
    address = parse_peer_address(f"{dial}/p2p/{PEER}")
    assert (address.dial, address.peer) == (dial, PEER)


def test_a_relayed_address_names_the_peer_behind_the_relay():
    address = parse_peer_address(circuit_address(f"/ip4/192.0.2.7/tcp/1/p2p/{OTHER}", PEER))
    assert (address.dial, address.peer) == (f"/ip4/192.0.2.7/tcp/1/p2p/{OTHER}/p2p-circuit", PEER)


@pytest.mark.row(7)
@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        (f"/ip/192.0.2.7/tcp/1/p2p/{PEER}", "did you mean /ip4"),
        ("/ip4/192.0.2.7/tcp/31337", "/p2p/PEER_ID"),
        (f"/ip4/192.0.2.7/tcp/1/p2p/{PEER} ", "space"),
        (f"/ip4/192.0.2.7 /tcp/1/p2p/{PEER}", "space"),
        (f"/ip4/192.0.2.7/tcp/1/p2p/{PEER}\n", "space"),
        ("http://192.0.2.7:31337", "URL"),
        ("192.0.2.7:31337", "begin with '/'"),
        (f"/ip4/192.0.2.7/tcp/0/p2p/{PEER}", "/tcp/0"),
        (f"/ip4/192.0.2.7/tcp/70000/p2p/{PEER}", "/tcp/70000 is not a port"),
        (f"/ip4/192.0.2/tcp/1/p2p/{PEER}", "/ip4/192.0.2 is not an IPv4 address"),
        (f"/ip4/home.example.org/tcp/1/p2p/{PEER}", "/dns4/home.example.org"),
        (f"/ip6/192.0.2.7/tcp/1/p2p/{PEER}", "is not an IPv6 address"),
        (f"/ip4/192.0.2.7/p2p/{PEER}", "no /tcp/PORT"),
        (f"/tcp/1/p2p/{PEER}", "begin with a host"),
        ("/ip4/192.0.2.7/tcp/1/p2p/", "/p2p/ has no value"),
        ("/ip4/192.0.2.7/tcp/1/p2p/12D3KooW", "not a peer id"),
        (f"/ip4/192.0.2.7/udp/1/p2p/{PEER}", "quic-v1"),
        (f"/ip4/192.0.2.7/tcp/1/p2p/{PEER}/tcp/2", "/p2p/... must be its end"),
        (f"/ip4/192.0.2.7/tcp/1/ip4/192.0.2.8/tcp/1/p2p/{PEER}", "one address at a time"),
        (f"/ip4/192.0.2.7/tcp/1/p2p/{OTHER}", "own"),
        ("", "begin with '/'"),
        ("/", "begin with a host"),
        ("/" + "x" * 5000, "5001 characters"),
    ],
)
def test_the_wrong_component_is_pointed_at(text: str, fragment: str):
    with pytest.raises(AddressError) as caught:
        parse_peer_address(text, own=OTHER)
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


def test_listen_addresses():
    assert parse_listen_address("/ip4/0.0.0.0/tcp/0") == "/ip4/0.0.0.0/tcp/0"
    assert port_of("/ip4/0.0.0.0/tcp/31337") == 31337
    for wrong in (f"/ip4/0.0.0.0/tcp/1/p2p/{PEER}", "/dns4/here/tcp/1", "/ip4/0.0.0.0"):
        with pytest.raises(AddressError):
            parse_listen_address(wrong)


def test_announce_addresses():
    assert parse_announce_address("/dns4/home.example.org/tcp/31337") == "/dns4/home.example.org/tcp/31337"
    for wrong in (f"/ip4/192.0.2.7/tcp/1/p2p/{PEER}", "/ip4/192.0.2.7/tcp/0"):
        with pytest.raises(AddressError):
            parse_announce_address(wrong)


@pytest.mark.row(3)
def test_what_is_printed_first_can_be_pasted_on_another_machine():
    loopback, lan, public, name = (
        "/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.5/tcp/1", "/ip4/8.8.8.8/tcp/1", "/dns4/home.example.org/tcp/1",
    )  # fmt: skip
    relayed = circuit_address(f"{public}/p2p/{OTHER}", PEER)
    assert by_reach([loopback, lan, relayed, public, name, loopback]) == (public, name, relayed, lan, loopback)
    assert reach(circuit_address(f"{loopback}/p2p/{OTHER}", PEER)) is Reach.LOOPBACK
    assert reach_warning([loopback, "/ip6/::1/tcp/1"]) is not None
    assert reach_warning([loopback, lan]) is None


@given(
    st.text(max_size=80)
    | st.lists(st.sampled_from(["ip4", "tcp", "p2p", "1.2.3.4", "0", PEER, "", "p2p-circuit"])).map("/".join)
)
def test_any_text_is_an_address_or_an_address_error(text: str):
    for parse in (parse_peer_address, parse_listen_address, parse_announce_address):
        try:
            parse(text)
        except AddressError:
            continue
