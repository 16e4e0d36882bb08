"""A graph as bytes: canonical MessagePack, decoded item by item into exactly the types of `schema.py`.

    graph      [opset, [input name], [parameter], [node], [type], [output value]]
    parameter  [name, trainable, update or nil, rule or nil, [alias]]      rule  [kind, a, b]
    node       [op, {argument name: argument}, first, count, module]       names in ascending order
    type       [[size], dtype, grad]
    argument   nil | bool | int | float64 | string | extension 1 (a value number, 4 bytes big-endian) | list of those

One graph has one encoding, so `ids.digest_of(encode_graph(graph))` identifies it. Nothing is allocated for a container before
its length was compared with its limit: 16 MiB of hostile bytes cannot become gigabytes of objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgpack

from fusion_p2p.errors import GraphError
from fusion_p2p.graph.schema import (
    MAX_GRAPH_BYTES,
    MAX_LIST,
    MAX_NODES,
    MAX_RANK,
    Argument,
    Graph,
    Node,
    Parameter,
    Ref,
    Rule,
    Scalar,
    TensorType,
)

MAX_VALUES = 4 * MAX_NODES
MAX_NAME_BYTES = 512
MAX_ARGUMENTS = 16
MAX_ALIASES = 64

_REF = 1
"""MessagePack extension type of a value number."""

_Item = TypeVar("_Item")


def encode_graph(graph: Graph) -> bytes:
    """The canonical bytes of a graph."""
    plain = [
        graph.opset,
        graph.inputs,
        [_plain_parameter(parameter) for parameter in graph.parameters],
        [_plain_node(node) for node in graph.nodes],
        [[item.shape, item.dtype, item.grad] for item in graph.types],
        graph.outputs,
    ]
    data: bytes = msgpack.packb(plain)
    return data


def decode_graph(data: bytes) -> Graph:
    """The graph that these bytes encode. GraphError, and nothing else, for anything that `encode_graph` would not write."""
    if len(data) > MAX_GRAPH_BYTES:
        raise GraphError(f"a graph of {len(data)} bytes is over the limit of {MAX_GRAPH_BYTES}")
    try:
        graph = _Reader(data).graph()
    except (msgpack.exceptions.UnpackException, ValueError) as error:
        raise GraphError(f"a graph is not well-formed MessagePack: {type(error).__name__}") from error
    if encode_graph(graph) != data:
        raise GraphError("a graph is not in its canonical encoding")
    return graph


def _plain_parameter(parameter: Parameter) -> list[Any]:
    rule = parameter.rule
    plain_rule = None if rule is None else [rule.kind, float(rule.a), float(rule.b)]
    return [parameter.name, parameter.trainable, parameter.update, plain_rule, parameter.aliases]


def _plain_node(node: Node) -> list[Any]:
    arguments = {name: _plain_argument(node.arguments[name]) for name in sorted(node.arguments)}
    return [node.op, arguments, node.first, node.count, node.module]


def _plain_argument(argument: Argument) -> object:
    if isinstance(argument, tuple):
        return [_plain_argument(item) for item in argument]
    if isinstance(argument, Ref):
        return msgpack.ExtType(_REF, argument.value.to_bytes(4, "big"))
    return argument


def _extension(code: int, data: bytes) -> Ref:
    if code != _REF or len(data) != 4:
        raise GraphError(f"a graph holds an extension of type {code}")
    return Ref(int.from_bytes(data, "big"))


class _Reader:
    """Reads one typed item after the other. The next byte is looked at before an item is unpacked, so that where a number or
    a name belongs no container is ever built."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._unpacker = msgpack.Unpacker(
            None,
            max_buffer_size=MAX_GRAPH_BYTES,
            max_str_len=MAX_NAME_BYTES,
            max_bin_len=0,
            max_ext_len=4,
            ext_hook=_extension,
        )
        self._unpacker.feed(data)

    def graph(self) -> Graph:
        self._record("graph", 6)
        graph = Graph(
            opset=self._integer("opset"),
            inputs=self._items("input names", MAX_NODES, lambda: self._text("input name")),
            parameters=self._items("parameters", MAX_NODES, self._parameter),
            nodes=self._items("nodes", MAX_NODES, self._node),
            types=self._items("types", MAX_VALUES, self._type),
            outputs=self._items("outputs", MAX_LIST, lambda: self._integer("output")),
        )
        if self._unpacker.tell() != len(self._data):
            raise GraphError("bytes follow the end of a graph")
        return graph

    def _parameter(self) -> Parameter:
        self._record("parameter", 5)
        return Parameter(
            name=self._text("parameter name"),
            trainable=self._flag("trainable"),
            update=None if self._next_is_nil() else self._integer("update"),
            rule=None if self._next_is_nil() else self._rule(),
            aliases=self._items("aliases", MAX_ALIASES, lambda: self._text("alias")),
        )

    def _rule(self) -> Rule:
        self._record("rule", 3)
        return Rule(self._text("rule kind"), self._real("rule value"), self._real("rule value"))

    def _node(self) -> Node:
        self._record("node", 5)
        return Node(
            op=self._text("op"),
            arguments=self._arguments(),
            first=self._integer("first output"),
            count=self._integer("output count"),
            module=self._text("module"),
        )

    def _type(self) -> TensorType:
        self._record("type", 3)
        shape = self._items("shape", MAX_RANK, lambda: self._integer("size"))
        return TensorType(shape, self._text("dtype"), self._flag("grad"))

    def _arguments(self) -> dict[str, Argument]:
        count: int = self._unpacker.read_map_header()
        if count > MAX_ARGUMENTS:
            raise GraphError(f"a node has {count} arguments, at most {MAX_ARGUMENTS} are allowed")
        return {self._text("argument name"): self._argument() for _ in range(count)}

    def _argument(self) -> Argument:
        if self._next_is_array():
            return self._items("argument", MAX_LIST, self._scalar)
        return self._scalar()

    def _scalar(self) -> Scalar:
        item = self._unpack("argument")
        if item is None or isinstance(item, (bool, int, float, str, Ref)):
            return item
        raise GraphError(f"an argument is a {type(item).__name__}")

    def _items(self, what: str, limit: int, read: Callable[[], _Item]) -> tuple[_Item, ...]:
        count: int = self._unpacker.read_array_header()
        if count > limit:
            raise GraphError(f"{count} {what}, at most {limit} are allowed")
        return tuple([read() for _ in range(count)])

    def _record(self, what: str, length: int) -> None:
        count = self._unpacker.read_array_header()
        if count != length:
            raise GraphError(f"a {what} has {count} fields instead of {length}")

    def _integer(self, what: str) -> int:
        item = self._unpack(what)
        if type(item) is not int:
            raise GraphError(f"{what} is a {type(item).__name__} instead of an integer")
        return item

    def _real(self, what: str) -> float:
        item = self._unpack(what)
        if type(item) is not float:
            raise GraphError(f"{what} is a {type(item).__name__} instead of a float")
        return item

    def _text(self, what: str) -> str:
        item = self._unpack(what)
        if type(item) is not str:
            raise GraphError(f"{what} is a {type(item).__name__} instead of a string")
        return item

    def _flag(self, what: str) -> bool:
        item = self._unpack(what)
        if type(item) is not bool:
            raise GraphError(f"{what} is a {type(item).__name__} instead of a boolean")
        return item

    def _unpack(self, what: str) -> object:
        head = self._head()
        if 0x80 <= head <= 0x9F or 0xDC <= head <= 0xDF:
            raise GraphError(f"{what} is a container")
        item: object = self._unpacker.unpack()
        return item

    def _next_is_nil(self) -> bool:
        if self._head() != 0xC0:
            return False
        self._unpacker.skip()
        return True

    def _next_is_array(self) -> bool:
        head = self._head()
        return 0x90 <= head <= 0x9F or head in (0xDC, 0xDD)

    def _head(self) -> int:
        position: int = self._unpacker.tell()
        if position >= len(self._data):
            raise GraphError("a graph ends too early")
        return self._data[position]
