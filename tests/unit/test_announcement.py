"""Announcements: small, strict, ordered by sequence number."""

from __future__ import annotations

import msgpack
import pytest

from fusion_p2p.errors import WireError
from fusion_p2p.swarm.announcement import (
    MAX_ADDRESSES,
    MAX_LINKS,
    MAX_PAYLOAD_BYTES,
    Announcement,
    Caps,
    Line,
    LinkFigure,
    MeasuredRates,
    Profile,
    Versions,
    announce,
    decode_announcement,
    encode_announcement,
    fitted,
)

ANNOUNCEMENT = Announcement(
    network="fusion",
    addresses=("/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWQuiteLongPeerIdThatLooksRealEnoughForATest00",) * 6,
    reachability="direct",
    versions=Versions(protocol=1, fusion="0.1.0", torch="2.13.0+cpu", python="3.11.7", codecs=("none",)),
    device="NVIDIA GeForce RTX 3080",
    rates=MeasuredRates(matmul_flops=2e13, convolution_flops=1e13, attention_flops=1.5e13, memory_bytes_per_s=6e11),
    free_bytes=9 << 30,
    caps=Caps(upload_bytes_per_s=1e6),
    line=Line(
        up_bytes_per_s=1.25e6,
        down_bytes_per_s=1.25e7,
        links=(LinkFigure(peer="12D3KooWQuiteLongPeerIdThatLooksRealEnoughForATest00", latency_s=0.02, out=1e6, back=9e6),) * 4,
    ),
    state="standby",
    incarnation=1_700_000_000_000,
    wall_s=1_700_000_000.5,
)


def payload(**changes: object) -> bytes:
    return bytes(8) + msgpack.packb({**ANNOUNCEMENT.model_dump(), **changes})


def test_an_announcement_comes_back_equal_and_fits() -> None:
    data = encode_announcement(ANNOUNCEMENT, 77)
    assert decode_announcement(data) == (77, ANNOUNCEMENT)
    assert len(data) < MAX_PAYLOAD_BYTES
    assert data[:8] < encode_announcement(ANNOUNCEMENT, 300)[:8]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"short", "sequence"),
        (bytes(8), "malformed"),
        (payload(extra=1), "extra"),
        (payload(state="asleep"), "state"),
        (payload(free_bytes=-1), "free_bytes"),
        (payload(free_bytes=1.5), "free_bytes"),
        (payload(addresses=["x" * 300]), "addresses"),
        (payload(addresses=["x"] * 7), "addresses"),
        (payload(line={"up_bytes_per_s": -1.0}), "line"),
        (payload(line={"links": [ANNOUNCEMENT.line.links[0].model_dump()] * 5}), "line"),
        (payload(wall_s=float("inf")), "wall_s"),
        (bytes(8) + bytes(MAX_PAYLOAD_BYTES + 1), "exceeds"),
    ],
)
def test_what_is_not_an_announcement_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(WireError, match=says):
        decode_announcement(data)


def test_too_large_a_one_is_our_own_fault() -> None:
    with pytest.raises(ValueError, match="exceeds"):
        encode_announcement(ANNOUNCEMENT.model_copy(update={"addresses": ("/dns/" + "x" * 250,) * 8}), 1)


def test_the_fullest_announcement_fits_by_leaving_out_links_then_far_fetched_addresses() -> None:
    profile = Profile(**{name: getattr(ANNOUNCEMENT, name) for name in Profile.model_fields})
    usual = fitted(announce(profile, ANNOUNCEMENT.addresses, "standby", 1, 1.0))
    assert len(usual.addresses) == MAX_ADDRESSES
    assert len(usual.line.links) == MAX_LINKS
    widest = {
        "network": "n" * 128,
        "device": "d" * 64,
        "versions": Versions(protocol=1 << 52, fusion="f" * 32, torch="t" * 32, python="p" * 32, codecs=("c" * 8,) * 16),
        "caps": Caps(upload_bytes_per_s=0.1, download_bytes_per_s=0.1),
        "line": ANNOUNCEMENT.line.model_copy(
            update={"links": (LinkFigure(peer="p" * 96, latency_s=0.1, out=0.1, back=0.1),) * 4}
        ),
    }
    addresses = [f"{number}" + "/dns/" + "x" * 250 for number in range(9)]
    full = fitted(announce(profile.model_copy(update=widest), addresses, "standby", 1 << 52, 1e11))
    assert decode_announcement(encode_announcement(full, (1 << 64) - 1))[1] == full
    assert full.line.links == ()
    assert full.line.up_bytes_per_s == 1.25e6
    assert 1 <= len(full.addresses) < MAX_ADDRESSES
    assert full.addresses == tuple(addresses[: len(full.addresses)]), "those that reach furthest come first"
