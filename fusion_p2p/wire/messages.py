"""Control messages: MessagePack maps with a `kind`, length-prefixed, at most 64 KiB, decoded strictly.

    message = length (4 bytes, big-endian) | MessagePack map

Each protocol has a `MessageSet`: the closed list of messages that may arrive on its streams. Decoding limits come first
(MessagePack's own, before anything is allocated), then the strict pydantic type of that kind: unknown keys, kinds and
wrong types are `WireError`s. So what a handler gets is what its type says.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fusion_p2p.errors import WireError

MAX_MESSAGE_BYTES = 64 << 10
LENGTH_BYTES = 4

Text = Annotated[str, Field(max_length=1024)]
"""A sentence or name from a peer; escape it before it reaches a terminal."""
Name = Annotated[str, Field(max_length=128)]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
PeerName = Annotated[str, Field(min_length=1, max_length=96)]
JobName = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
DigestText = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class Message(BaseModel):
    """Base of all control messages; a subclass sets `kind` and its fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    kind: ClassVar[str]


class Record(BaseModel):
    """A part of a message: strict, closed and frozen as messages are, but never sent alone."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class MessageSet:
    """The messages of one protocol, by kind."""

    def __init__(self, *types: type[Message]) -> None:
        self._types = {message.kind: message for message in types}

    def encode(self, message: Message) -> bytes:
        """The message with its length in front. ValueError when it is not of this set or too large: our own fault."""
        if self._types.get(message.kind) is not type(message):
            raise ValueError(f"{type(message).__name__} is not a message of this protocol")
        body: bytes = msgpack.packb({"kind": message.kind, **message.model_dump()})
        if len(body) > MAX_MESSAGE_BYTES:
            raise ValueError(f"{message.kind} of {len(body)} bytes exceeds {MAX_MESSAGE_BYTES}")
        return len(body).to_bytes(LENGTH_BYTES, "big") + body

    def decode(self, body: bytes) -> Message:
        """The message in `body` (without the length). WireError for anything but a well-formed message of this set."""
        fields = unpack(body)
        if not isinstance(fields, dict):
            raise WireError("control message is not a map")
        kind = fields.pop("kind", None)
        message = self._types.get(kind) if isinstance(kind, str) else None
        if message is None:
            raise WireError(f"unknown control message {str(kind)[:40]!r}")
        try:
            return message.model_validate(fields)
        except ValidationError as error:
            raise WireError(f"{message.kind}: {describe(error)}") from None


def unpack(body: bytes, limit: int = MAX_MESSAGE_BYTES) -> Any:
    """Decode one MessagePack object of at most `limit` bytes; lists arrive as tuples. WireError when malformed."""
    if len(body) > limit:
        raise WireError(f"message of {len(body)} bytes exceeds {limit}")
    try:
        return msgpack.unpackb(body, use_list=False, raw=False, strict_map_key=True, ext_hook=_refuse_extension)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"malformed MessagePack: {type(error).__name__}") from None


def body_length(prefix: bytes) -> int:
    """Length of the message that follows a 4-byte prefix; WireError beyond the limit, before anything is read."""
    length = int.from_bytes(prefix, "big")
    if length > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {length} bytes exceeds {MAX_MESSAGE_BYTES}")
    return length


def describe(error: ValidationError) -> str:
    """The first thing wrong, in a few words without the value (it came from a stranger)."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part)[:40] for part in first["loc"]) or "message"
    return f"{where}: {first['msg'][:120]}"


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} ({len(data)} bytes) is not allowed")
