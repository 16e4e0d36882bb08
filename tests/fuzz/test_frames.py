"""Frame headers from strangers: decoded exactly, or refused with WireError."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.errors import WireError
from fusion_p2p.wire.frames import HEADER_BYTES, decode_header, encode_header
from tests.fuzz.hostile_bytes import attack_frames


@pytest.mark.row(37)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_hostile_headers_are_decoded_or_refused(seed: int):
    outcome = attack_frames(5_000, seed)
    assert outcome.unexpected == []
    assert outcome.inputs == 5_000
    assert outcome.refused > 1_000
    assert outcome.accepted > 500


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES) | st.binary(max_size=200))
def test_any_bytes_are_decoded_exactly_or_refused(data: bytes):
    try:
        header = decode_header(data)
    except WireError:
        return
    assert encode_header(header) == data
