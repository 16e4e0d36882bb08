"""Hostile graphs are refused with GraphError, or they run; nothing else happens."""

from __future__ import annotations

import resource

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusion_p2p.errors import GraphError
from fusion_p2p.graph.check import check
from fusion_p2p.graph.encoding import decode_graph, encode_graph
from tests.fuzz.graph_mutation import LIMITS, Outcome, fuzz, try_bytes
from tests.fuzz.original_graphs import originals

pytestmark = [pytest.mark.row(34), pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_mutants_are_refused_or_run(seed: int) -> None:
    counts = fuzz(50, seed)  # fills torch's caches
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts = fuzz(1200, seed)
    assert counts.unexpected == []
    assert counts.inputs == 1200
    assert counts.outcomes[Outcome.RAN] > 30
    assert counts.outcomes[Outcome.REFUSED] > 600
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10


def test_originals_are_legal_and_run() -> None:
    for original in originals():
        check(original.graph, LIMITS)
        assert try_bytes(encode_graph(original.graph)) is Outcome.RAN


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200))
def test_arbitrary_bytes(data: bytes) -> None:
    assert try_bytes(data) is Outcome.REFUSED


leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
)
plain = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
records = st.lists(st.lists(plain, max_size=5), max_size=4)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.tuples(plain, records, records, records, records, records))
def test_arbitrary_messagepack_of_the_right_outline(fields: tuple[object, ...]) -> None:
    with pytest.raises(GraphError):
        check(decode_graph(msgpack.packb(fields)), LIMITS)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sampled_from(range(8)), st.integers(0, 5000), st.integers(0, 255))
def test_one_byte_changed(which: int, place: int, byte: int) -> None:
    data = bytearray(encode_graph(originals()[which].graph))
    data[place % len(data)] = byte
    try:
        graph = decode_graph(bytes(data))
    except GraphError:
        return
    assert encode_graph(graph) == data
