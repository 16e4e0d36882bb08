"""The codec of one edge: values and gradients of a declared type to payloads and back. Which edge uses which is the plan's to
say; a codec only obeys. Sizes are those of `wire.codecs`.

On a `topk` edge the gradient is sent at the places that the forward pass kept: the exact gradient of a network that has the
mask in it. So the sender of a value remembers its places until the gradient is back, and the reader until it has sent it.

A tensor that holds NaN or an infinity is refused: its payload is empty, and the reader gets NaN everywhere. The step is then
skipped as any step that is not finite; the codec's own arithmetic never turns NaN into numbers that look sound.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from fusion_p2p.compress.dense import from_bytes, to_bytes, to_device
from fusion_p2p.compress.quantising import (
    decode_int4,
    decode_int4_of_channels,
    decode_int8,
    encode_int4,
    encode_int4_of_channels,
    encode_int8,
)
from fusion_p2p.compress.sparse import SparseCoder, decode_fp16, encode_fp16
from fusion_p2p.errors import WireError
from fusion_p2p.graph.opset import TORCH_DTYPES
from fusion_p2p.graph.schema import TensorType
from fusion_p2p.wire.codecs import SPARSE, CodecSpec, accepts, channel_dimension, described_channels, effective, payload_bytes
from fusion_p2p.wire.frames import Moment

Buffer = bytes | bytearray | memoryview
REFUSED = memoryview(b"")
"""The payload of a tensor that is not finite."""


class Coder(Protocol):
    """Turns (n,) float32 tensors into bytes and back; places are those a sparse codec kept, else None."""

    def encode(self, flat: Tensor, seed: int | None) -> tuple[Tensor, Tensor | None] | None:
        """None for a tensor that is not finite."""

    def decode(self, data: Tensor) -> tuple[Tensor, Tensor | None]: ...


class EdgeCodec:
    """The codec of the edge that carries value `key[0]` from slice `key[1]` to slice `key[2]`, at one of its ends.

    All calls belong on one thread. Decoding raises WireError for payloads that no encoder could have made.
    """

    def __init__(self, spec: CodecSpec, type: TensorType, device: torch.device, key: tuple[int, int, int] = (0, 0, 0)) -> None:
        self._spec, self._type, self._device, self._key = effective(spec, type), type, device, key
        self._coder = _coder(self._spec, type, device)
        self._kept: dict[Moment, Tensor | None] = {}

    @property
    def family(self) -> str:
        """What frame headers name: `none` also where the plan's codec does not apply."""
        return self._spec.family

    @property
    def moments_kept(self) -> int:
        """Micro-batches whose places are remembered."""
        return len(self._kept)

    def encode_forward(self, moment: Moment, tensor: Tensor) -> memoryview:
        """The payload of a value in training."""
        data, places = self._encode(tensor, None)
        self._remember(moment, places)
        return data

    def decode_forward(self, moment: Moment, data: Buffer) -> Tensor:
        """The value in a payload of training."""
        tensor, places = self._decode(data, backward=False)
        self._remember(moment, places)
        return tensor

    def encode_backward(self, moment: Moment, gradient: Tensor) -> memoryview:
        """The payload of a gradient, rounded stochastically with a seed that (step, micro-batch, edge) give."""
        seed = self._seed(moment)
        if not isinstance(self._coder, SparseCoder) or not self._spec.reuses_mask:
            return self._encode(gradient, seed)[0]
        places = self._recall(moment)
        coded = None if places is None else self._coder.encode_masked(_flat(gradient), places, seed)
        return REFUSED if coded is None else to_bytes(coded)

    def decode_backward(self, moment: Moment, data: Buffer) -> Tensor:
        """The gradient in a payload."""
        if not isinstance(self._coder, SparseCoder) or not self._spec.reuses_mask:
            return self._decode(data, backward=True)[0]
        payload, places = self._checked(data, backward=True), self._recall(moment)
        if not len(payload):
            return self._refused()
        if places is None:
            raise WireError(f"a gradient came for value {self._key[0]}, which was refused")
        return self._shaped(self._coder.scatter(to_device(self._coder.decode_masked(payload), self._device), places))

    def drop(self, moment: Moment) -> None:
        """No gradient flows back at this moment."""
        self._kept.pop(moment, None)

    def forget(self, step: int) -> None:
        """A step is over; values of the next one may have crossed already."""
        self._kept = {moment: places for moment, places in self._kept.items() if moment.step > step}

    def _encode(self, tensor: Tensor, seed: int | None) -> tuple[memoryview, Tensor | None]:
        if self._coder is None:
            return to_bytes(tensor), None
        coded = self._coder.encode(_flat(tensor), seed)
        return (REFUSED, None) if coded is None else (to_bytes(coded[0]), coded[1])

    def _decode(self, data: Buffer, *, backward: bool) -> tuple[Tensor, Tensor | None]:
        if self._coder is None:
            return from_bytes(data, self._type, self._device), None
        payload = self._checked(data, backward=backward)
        if not len(payload):
            return self._refused(), None
        flat, places = self._coder.decode(payload)
        return self._shaped(flat), places

    def _checked(self, data: Buffer, *, backward: bool) -> Tensor:
        view = memoryview(data).cast("B")
        if not accepts(self._spec, self._type, view.nbytes, backward=backward):
            way = "gradient" if backward else "value"
            raise WireError(f"payload of {view.nbytes} bytes is no {way} of {self._type} coded as {self._spec}")
        return from_bytes(view, TensorType((view.nbytes,), "uint8", False), torch.device("cpu"))

    def _shaped(self, flat: Tensor) -> Tensor:
        dtype = TORCH_DTYPES[self._type.dtype]
        if dtype is not torch.float32:
            flat = flat.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
        return flat.to(dtype).to(self._device).reshape(self._type.shape)

    def _refused(self) -> Tensor:
        return torch.full(self._type.shape, torch.nan, dtype=TORCH_DTYPES[self._type.dtype], device=self._device)

    def _remember(self, moment: Moment, places: Tensor | None) -> None:
        if self._spec.reuses_mask:
            self._kept[moment] = None if places is None else places.to(torch.int32)

    def _recall(self, moment: Moment) -> Tensor | None:
        if moment not in self._kept:
            raise WireError(f"value {self._key[0]} has not crossed at step {moment.step}, micro-batch {moment.micro_batch}")
        places = self._kept.pop(moment)
        return None if places is None else places.long()

    def _seed(self, moment: Moment) -> int:
        return zlib.crc32(struct.pack("<5I", moment.step, moment.micro_batch, *self._key))


class _Cast:
    """Two bytes per element."""

    def __init__(
        self, encode: Callable[[Tensor], Tensor | None], decode: Callable[[Tensor], Tensor], device: torch.device
    ) -> None:
        self._encode, self._decode, self._device = encode, decode, device

    def encode(self, flat: Tensor, seed: int | None) -> tuple[Tensor, None] | None:
        data = self._encode(flat)
        return None if data is None else (data, None)

    def decode(self, data: Tensor) -> tuple[Tensor, None]:
        return self._decode(to_device(data, self._device)), None


class _Blockwise:
    """Blocks with a scale."""

    def __init__(
        self,
        encode: Callable[[Tensor, int | None], Tensor | None],
        decode: Callable[[Tensor, int], Tensor],
        count: int,
        device: torch.device,
    ) -> None:
        self._encode, self._decode, self._count, self._device = encode, decode, count, device

    def encode(self, flat: Tensor, seed: int | None) -> tuple[Tensor, None] | None:
        data = self._encode(flat, seed)
        return None if data is None else (data, None)

    def decode(self, data: Tensor) -> tuple[Tensor, None]:
        return self._decode(to_device(data, self._device), self._count), None


class _Channelwise:
    """Values of a type with their channels described; gradients, of which little is known beforehand, in plain blocks."""

    def __init__(self, type: TensorType, device: torch.device) -> None:
        place = channel_dimension(type)
        before, behind = math.prod(type.shape[:place]), math.prod(type.shape[place + 1 :])
        self._shape, self._device = (before, type.shape[place], behind), device
        self._gradient_bytes = payload_bytes(CodecSpec("int4"), type, backward=True)[0]

    def encode(self, flat: Tensor, seed: int | None) -> tuple[Tensor, None] | None:
        data = encode_int4_of_channels(flat.view(self._shape)) if seed is None else encode_int4(flat, seed)
        return None if data is None else (data, None)

    def decode(self, data: Tensor) -> tuple[Tensor, None]:
        moved = to_device(data, self._device)
        if len(data) == self._gradient_bytes:
            return decode_int4(moved, math.prod(self._shape)), None
        return decode_int4_of_channels(moved, self._shape), None


def _coder(spec: CodecSpec, type: TensorType, device: torch.device) -> Coder | None:
    """What codes a family; None sends every element as it is."""
    count = type.num_elements
    if spec.family in SPARSE:
        return SparseCoder(spec, count, device)
    match spec.family:
        case "bf16":
            return _Cast(_encode_bf16, _decode_bf16, device)
        case "fp16":
            return _Cast(encode_fp16, decode_fp16, device)
        case "int8":
            return _Blockwise(encode_int8, decode_int8, count, device)
        case "int4" if described_channels(type):
            return _Channelwise(type, device)
        case "int4":
            return _Blockwise(encode_int4, decode_int4, count, device)
    return None


def _encode_bf16(flat: Tensor) -> Tensor | None:
    least, greatest = (float(extreme) for extreme in torch.aminmax(flat))
    if not math.isfinite(least) or not math.isfinite(greatest):
        return None
    limit = torch.finfo(torch.bfloat16).max
    within = flat if -limit <= least and greatest <= limit else flat.clamp(-limit, limit)
    return within.to(torch.bfloat16).view(torch.uint8)


def _decode_bf16(data: Tensor) -> Tensor:
    return data.view(torch.bfloat16).float()


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).float()
