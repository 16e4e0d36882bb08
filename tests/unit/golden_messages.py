"""The bytes of one message of each kind and of a frame header, kept in golden_messages.json.

They are what peers of this protocol version expect. When they change on purpose, raise `fusion_p2p.PROTOCOL` if a released
version would not understand it, and write them anew:

    python -m tests.unit.golden_messages
"""

from __future__ import annotations

import json
from pathlib import Path

from fusion_p2p.graph.schema import TensorType
from fusion_p2p.ids import JobId
from fusion_p2p.wire.frames import Direction, Edge, FrameKind, Header, Moment, RunId, encode_header
from tests.fuzz.examples import MESSAGE_SETS, examples

GOLDEN = Path(__file__).with_suffix(".json")
HEADER = Header(
    kind=FrameKind.VALUE,
    run=RunId(JobId("0123456789abcdef" * 2), 2, 3),
    moment=Moment(4, 5),
    edge=Edge(6, 7, 8, Direction.BACKWARD),
    type=TensorType((9, 10), "float32", False),
    payload_bytes=360,
)


def encoded() -> dict[str, str]:
    """Hexadecimal bytes by `protocol.kind`."""
    messages = {
        f"{name}.{message.kind}": messages.encode(message).hex()
        for name, messages in MESSAGE_SETS.items()
        for message in examples(messages)
    }
    return {"frame.header": encode_header(HEADER).hex(), **messages}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(encoded(), indent=1) + "\n")
