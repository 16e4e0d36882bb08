"""What the state of a slice consists of, for a peer that keeps a copy of it without knowing the graph.

    manifest = MessagePack array of [name, dtype, shape], parameters first, in graph order (`execute.state.required_tensors`)
    digest of a state = blake2b-256 of (manifest, then the raw bytes of its tensors in the order of the manifest)

The owner serves a manifest by its digest; a peer that was asked to guard a slice fetches tensor by tensor what it names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

from fusion_p2p.errors import WireError
from fusion_p2p.graph.schema import DTYPE_BYTES, MAX_DIMENSION, MAX_RANK, TensorType
from fusion_p2p.ids import Digest
from fusion_p2p.wire.messages import describe, unpack

MAX_MANIFEST_BYTES = 8 << 20
MAX_TENSORS = 60_000
MAX_STATE_BYTES = 1 << 40
"""Of one slice: sizes from a stranger are added up."""

_Entry = tuple[
    Annotated[str, Field(min_length=1, max_length=512)],
    Annotated[str, Field(max_length=16)],
    Annotated[tuple[Annotated[int, Field(ge=0, lt=MAX_DIMENSION)], ...], Field(max_length=MAX_RANK)],
]
_ENTRIES: TypeAdapter[tuple[_Entry, ...]] = TypeAdapter(Annotated[tuple[_Entry, ...], Field(max_length=MAX_TENSORS)])


def encode_manifest(tensors: Mapping[str, TensorType]) -> bytes:
    """The canonical bytes of a manifest. ValueError when it is too large: our own fault."""
    data: bytes = msgpack.packb([(name, type.dtype, type.shape) for name, type in tensors.items()])
    if len(data) > MAX_MANIFEST_BYTES:
        raise ValueError(f"manifest of {len(data)} bytes exceeds {MAX_MANIFEST_BYTES}")
    return data


def decode_manifest(data: bytes) -> dict[str, TensorType]:
    """Names and types in their order. WireError for anything that is not a well-formed manifest."""
    try:
        entries = _ENTRIES.validate_python(unpack(data, MAX_MANIFEST_BYTES), strict=True)
    except ValidationError as error:
        raise WireError(f"manifest: {describe(error)}") from None
    tensors = {name: TensorType(shape, _known(dtype), False) for name, dtype, shape in entries}
    if len(tensors) < len(entries):
        raise WireError("manifest: a tensor is named twice")
    if sum(type.num_bytes for type in tensors.values()) > MAX_STATE_BYTES:
        raise WireError(f"manifest: a state of more than {MAX_STATE_BYTES} bytes")
    return tensors


def state_bytes(tensors: Mapping[str, TensorType]) -> int:
    """How large a state is."""
    return sum(type.num_bytes for type in tensors.values())


class StateDigest:
    """The digest of a state, taken while its tensors come in, in the order of the manifest."""

    def __init__(self, manifest: bytes) -> None:
        self._hash = hashlib.blake2b(manifest, digest_size=32)

    def add(self, tensor: bytes | bytearray | memoryview) -> None:
        """The raw bytes of the next tensor."""
        self._hash.update(tensor)

    def result(self) -> Digest:
        """The digest of what was added so far."""
        return Digest(self._hash.hexdigest())


def _known(dtype: str) -> str:
    if dtype not in DTYPE_BYTES:
        raise WireError(f"manifest: unknown type {dtype[:16]!r}")
    return dtype
