"""Frame headers: fixed bytes, exact decoding."""

from __future__ import annotations

import dataclasses

import pytest

from fusion_p2p.errors import WireError
from fusion_p2p.graph.schema import TensorType
from fusion_p2p.wire.frames import (
    DTYPES,
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    FrameKind,
    decode_header,
    encode_header,
)
from tests.unit.golden_messages import HEADER

PLAIN = dataclasses.replace(HEADER, type=None, payload_bytes=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_comes_back_as_it_was(dtype: str):
    for shape in ((), (0,), (3,), tuple(range(1, 9))):
        header = dataclasses.replace(HEADER, type=TensorType(shape, dtype, False))
        data = encode_header(header)
        assert len(data) == HEADER_BYTES
        assert decode_header(data) == header


@pytest.mark.parametrize("kind", [FrameKind.NONE, FrameKind.CREDIT])
def test_an_explicit_nothing_and_a_credit_carry_no_type(kind: FrameKind):
    header = dataclasses.replace(PLAIN, kind=kind)
    assert decode_header(encode_header(header)) == header


@pytest.mark.row(37)
def test_a_header_that_claims_too_much_is_refused_before_anything_is_allocated():
    data = encode_header(dataclasses.replace(HEADER, payload_bytes=MAX_PAYLOAD_BYTES + 1))
    with pytest.raises(WireError, match=str(MAX_PAYLOAD_BYTES)):
        decode_header(data)


@pytest.mark.parametrize(
    "offset", [0, 2, 3, 44, 45, 46, 47], ids=["magic", "version", "kind", "direction", "dtype", "rank", "codec"]
)
def test_a_field_out_of_range_is_refused(offset: int):
    wrong = bytearray(encode_header(HEADER))
    wrong[offset] = 0xFE
    with pytest.raises(WireError):
        decode_header(bytes(wrong))


def test_another_length_is_refused():
    data = encode_header(HEADER)
    for length in (0, HEADER_BYTES - 1, HEADER_BYTES + 1):
        with pytest.raises(WireError, match=str(length)):
            decode_header((data + data)[:length])


def test_only_values_have_a_type():
    for kind in (FrameKind.NONE, FrameKind.CREDIT):
        data = bytearray(encode_header(HEADER))
        data[3] = kind
        with pytest.raises(WireError, match="do not belong"):
            decode_header(bytes(data))
