"""Graphs as bytes: golden bytes, every kind of argument, and what is refused."""

from __future__ import annotations

import dataclasses
import tracemalloc

import msgpack
import pytest

from fusion_p2p.errors import GraphError
from fusion_p2p.graph.encoding import MAX_NAME_BYTES, MAX_VALUES, decode_graph, encode_graph
from fusion_p2p.graph.schema import MAX_GRAPH_BYTES, MAX_LIST, MAX_NODES, Graph, Node, Parameter, Ref, Rule, TensorType
from fusion_p2p.ids import digest_of

NODE = Node("mul.Tensor", {"self": Ref(0), "other": Ref(1)}, 2, 1, "h.0")
GRAPH = Graph(
    opset=1,
    inputs=("x",),
    parameters=(Parameter("w", True, None, Rule("normal", 0.0, 0.02), ("v",)),),
    nodes=(NODE,),
    types=(TensorType((2, 3), "float32", False), TensorType((3,), "float32", True), TensorType((2, 3), "float32", True)),
    outputs=(2,),
)


def test_golden_bytes() -> None:
    """A change here is a change of the wire format: raise the opset or the protocol."""
    assert digest_of(encode_graph(GRAPH)) == "ab3e28528c969e582cfdb856d92d4bc6062109966e41adf5afca5ac1248bedfc"
    assert decode_graph(encode_graph(GRAPH)) == GRAPH


def test_every_kind_of_argument_survives() -> None:
    arguments = {
        "a": None, "b": True, "c": False, "d": -3, "e": 2**63 - 1, "f": 1.0, "g": float("-inf"), "h": "tanh", "i": Ref(70_000),
        "j": (), "k": (1, 2.5, None, Ref(3), "none", True),
    }  # fmt: skip
    graph = dataclasses.replace(GRAPH, nodes=(dataclasses.replace(NODE, arguments=arguments),))
    decoded = decode_graph(encode_graph(graph)).nodes[0].arguments
    assert decoded == arguments
    assert [type(value) for value in decoded.values()] == [type(value) for value in arguments.values()]


def test_the_order_of_arguments_does_not_change_the_bytes() -> None:
    turned = dataclasses.replace(NODE, arguments=dict(reversed(NODE.arguments.items())))
    assert encode_graph(dataclasses.replace(GRAPH, nodes=(turned,))) == encode_graph(GRAPH)


def plain() -> list:
    return msgpack.unpackb(encode_graph(GRAPH), strict_map_key=False)


def changed(path: tuple[int | str, ...], value: object) -> bytes:
    data = plain()
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return msgpack.packb(data)


WRONG: dict[str, bytes] = {
    "nothing": b"",
    "a number": b"\x01",
    "one byte that means nothing": b"\xc1",
    "cut short": encode_graph(GRAPH)[:-3],
    "bytes behind": encode_graph(GRAPH) + b"\x00",
    "opset as a float": changed((0,), 1.0),
    "opset as a boolean": changed((0,), True),
    "inputs as a map": changed((1,), {"x": 1}),
    "input name as bytes": changed((1, 0), b"x"),
    "input name as a number": changed((1, 0), 3),
    "long name": changed((1, 0), "x" * (MAX_NAME_BYTES + 1)),
    "name that is not UTF-8": encode_graph(GRAPH).replace(b"\xa1x", b"\xa1\xff"),
    "trainable as a number": changed((2, 0, 1), 1),
    "update as a boolean": changed((2, 0, 2), True),
    "update as a list": changed((2, 0, 2), [1]),
    "rule of two": changed((2, 0, 3), ["normal", 0.0]),
    "rule with an integer": changed((2, 0, 3), ["normal", 0, 0.02]),
    "aliases as text": changed((2, 0, 4), "v"),
    "node as a map": changed((3, 0), {"op": "relu"}),
    "node too short": changed((3, 0), ["relu", {}, 2, 1]),
    "argument as a map": changed((3, 0, 1, "self"), {"v": 1}),
    "argument as a list of lists": changed((3, 0, 1, "self"), [[1]]),
    "argument as bytes": changed((3, 0, 1, "self"), b"\x00"),
    "argument of another extension": changed((3, 0, 1, "self"), msgpack.ExtType(2, b"\0\0\0\0")),
    "argument of a long extension": changed((3, 0, 1, "self"), msgpack.ExtType(1, b"\0\0\0\0\0")),
    "argument as a time": changed((3, 0, 1, "self"), msgpack.Timestamp(1)),
    "argument name as a number": changed((3, 0, 1), {1: None}),
    "too many arguments": changed((3, 0, 1), {f"a{index}": None for index in range(17)}),
    "long list": changed((3, 0, 1, "self"), [0] * (MAX_LIST + 1)),
    "arguments out of order": msgpack.packb([1, [], [], [["relu", {"b": 1, "a": 1}, 0, 1, ""]], [], []]),
    "number in a longer form": encode_graph(GRAPH).replace(b"\x96\x01", b"\x96\xcc\x01"),
    "float in a shorter form": encode_graph(GRAPH).replace(b"\xcb" + bytes(8), b"\xca" + bytes(4)),
    "grad as nil": changed((4, 0, 2), None),
    "shape of rank 9": changed((4, 0, 0), [1] * 9),
    "size as a float": changed((4, 0, 0), [1.5]),
    "output as a list": changed((5, 0), [2]),
    "outputs missing": msgpack.packb(plain()[:5]),
    "too many nodes": b"\x96\x01\x90\x90\xdd" + (MAX_NODES + 1).to_bytes(4, "big"),
    "array of four billion": b"\x96\x01\xdd\xff\xff\xff\xff",
    "map of four billion": b"\x96\x01\x90\x90\x91\x95\xa4relu\xdf\xff\xff\xff\xff",
    "text of four billion bytes": b"\x96\x01\x91\xdb\xff\xff\xff\xff",
    "deep nesting": b"\x91" * 100_000,
    "too many types": b"\x96\x01\x90\x90\x90\xdd" + (MAX_VALUES + 1).to_bytes(4, "big"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_bytes_are_refused(kind: str) -> None:
    assert WRONG[kind] != encode_graph(GRAPH)
    with pytest.raises(GraphError):
        decode_graph(WRONG[kind])


@pytest.mark.row(37)
def test_more_than_the_limit_is_refused_unread() -> None:
    with pytest.raises(GraphError, match="over the limit"):
        decode_graph(bytes(MAX_GRAPH_BYTES + 1))


@pytest.mark.row(37)
@pytest.mark.parametrize(
    "bomb",
    [
        b"\x96\x01\xdd\x00\x00\x4e\x20" + b"\x90" * (2 << 20),
        b"\x96\x01\x90\x90\xdd\x00\x00\x4e\x20" + b"\x95\xa0\x80\x00\x01\xa0" * 300_000,
        b"\x96\x01\x90\x90\x91\x95\xa0\x81\xa0\xdc\x01\x00" + b"\xdc\x01\x00" * (2 << 20),
    ],
    ids=["empty lists as names", "empty nodes", "lists in lists"],
)
def test_memory_stays_within_a_few_times_the_bytes(bomb: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(GraphError):
            decode_graph(bomb)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20
