"""Codecs by name: how a value becomes a payload. Which edge uses which is the plan's to say; a codec only obeys."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fusion_p2p.compress.dense import from_bytes, to_bytes
from fusion_p2p.graph.schema import TensorType


class Codec(Protocol):
    """Turns tensors of a declared type into payloads and back. Stateless, so that any order of values is the same."""

    @property
    def name(self) -> str:
        """The name in plans and frame headers."""

    def wire_bytes(self, type: TensorType) -> int:
        """Exact size of the payload of any tensor of this type, known before encoding."""

    def encode(self, tensor: Tensor) -> memoryview:
        """The payload. It may share the tensor's memory."""

    def decode(self, buffer: bytes | bytearray | memoryview, type: TensorType, device: torch.device) -> Tensor:
        """The tensor in a payload; WireError when it is not one of this type."""


class Dense:
    """Every element as it is."""

    name = "none"

    def wire_bytes(self, type: TensorType) -> int:
        return type.num_bytes

    def encode(self, tensor: Tensor) -> memoryview:
        return to_bytes(tensor)

    def decode(self, buffer: bytes | bytearray | memoryview, type: TensorType, device: torch.device) -> Tensor:
        return from_bytes(buffer, type, device)


CODECS: dict[str, Codec] = {"none": Dense()}
"""Every name of `wire.frames.CODECS`."""
