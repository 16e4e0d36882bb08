"""What a guard is told of a state: round trips, and nothing a stranger says is believed beyond its limits."""

from __future__ import annotations

import hashlib

import msgpack
import pytest
from hypothesis import given
from hypothesis.strategies import dictionaries, integers, lists, sampled_from, text, tuples

from fusion_p2p.errors import WireError
from fusion_p2p.graph.schema import DTYPE_BYTES, TensorType
from fusion_p2p.wire.manifest import StateDigest, decode_manifest, encode_manifest, state_bytes

shapes = lists(integers(0, 7), max_size=4).map(tuple)
types = tuples(shapes, sampled_from(sorted(DTYPE_BYTES))).map(lambda pair: TensorType(pair[0], pair[1], False))


@given(dictionaries(text(min_size=1, max_size=20), types, max_size=8))
def test_names_types_and_order_come_back(tensors: dict[str, TensorType]) -> None:
    decoded = decode_manifest(encode_manifest(tensors))
    assert list(decoded.items()) == list(tensors.items())
    assert state_bytes(decoded) == sum(type.num_bytes for type in tensors.values())


@pytest.mark.parametrize(
    "entries",
    [
        [("a", "float32", (2,)), ("a", "float32", (2,))],
        [("a", "float31", (2,))],
        [("a", "float32", (-1,))],
        [("a", "float32", (1 << 31,))],
        [("a", "float32", (1 << 30, 1 << 30))],
        [("a", "float32", (1,) * 9)],
        [("", "float32", ())],
        [("a", "float32")],
        [("a", "float32", (2.0,))],
        {"a": 1},
        7,
    ],
)
def test_nonsense_is_refused(entries: object) -> None:
    with pytest.raises(WireError, match="manifest"):
        decode_manifest(msgpack.packb(entries))


def test_the_digest_is_of_the_manifest_and_of_all_bytes_in_order() -> None:
    manifest = encode_manifest(
        {"parameter/a": TensorType((2,), "uint8", False), "parameter/b": TensorType((1,), "uint8", False)}
    )
    digest = StateDigest(manifest)
    digest.add(b"\1\2")
    digest.add(memoryview(b"\3"))
    assert digest.result() == hashlib.blake2b(manifest + b"\1\2\3", digest_size=32).hexdigest()
