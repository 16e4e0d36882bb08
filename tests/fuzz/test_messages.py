"""Control messages from strangers: decoded exactly, or refused with WireError, in bounded memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.errors import WireError
from fusion_p2p.wire.messages import MAX_MESSAGE_BYTES
from tests.fuzz.examples import MESSAGE_SETS, examples
from tests.fuzz.hostile_bytes import attack_messages

KINDS = [message.kind for messages in MESSAGE_SETS.values() for message in examples(messages)]
plain = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=50)
    | st.binary(max_size=50)
)
nested = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=12), inner, max_size=5)
)


@pytest.mark.row(37)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_hostile_messages_are_decoded_or_refused(seed: int):
    outcome = attack_messages(4_000, seed)
    assert outcome.unexpected == []
    assert outcome.inputs == 4_000
    assert outcome.refused > 2_000
    assert outcome.accepted > 20, "if nothing passes, the attack only hits the first check"


@pytest.mark.row(37)
def test_memory_stays_bounded():
    attack_messages(200, seed=4)
    tracemalloc.start()
    try:
        attack_messages(1_000, seed=5)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 64 * MAX_MESSAGE_BYTES


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(list(MESSAGE_SETS)), st.binary(max_size=300))
def test_any_bytes_are_a_message_or_refused(name: str, data: bytes):
    decode_or_refuse(name, data)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sampled_from(list(MESSAGE_SETS)), st.sampled_from(KINDS), st.dictionaries(st.text(max_size=12), nested, max_size=6))
def test_any_fields_are_a_message_or_refused(name: str, kind: str, fields: dict[str, Any]):
    decode_or_refuse(name, msgpack.packb({**fields, "kind": kind}, unicode_errors="surrogatepass"))


def decode_or_refuse(name: str, data: bytes) -> None:
    try:
        MESSAGE_SETS[name].decode(data)
    except WireError as error:
        said = str(error)
    else:
        return
    assert len(said) < 400
