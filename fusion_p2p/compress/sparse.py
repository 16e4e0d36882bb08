"""Sparse payloads: the values of the largest elements, and where they are. Layouts, n elements of which k are kept:

    topk, topk-independent    values, remainders, quotients        (places: `compress.bits`)
    gradient of topk          values alone, in the order of the places that its forward pass kept
    topk-paper                k float32 values, then k int64 places

    values fp32   k float32
    values fp16   exponent e as int16, then k float16 of value * 2**-e, the largest of them in [0.5, 1) (e is 0 when all are 0)
    values int8   of a gradient of topk: as `compress.quantising` writes int8
                  else a bfloat16 floor that no magnitude is below, a bfloat16 span per block of 64 values, and k numbers of
                  7 bits: sign in bit 6, and in the bits below (magnitude - floor) / span, from 0 to 63

The kept are the largest, so no code is spent on magnitudes below their smallest: 7 bits give the precision of 8.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fusion_p2p.compress import bits
from fusion_p2p.compress.dense import all_finite, to_device, to_host
from fusion_p2p.compress.quantising import (
    bfloat16_bytes,
    decode_int8,
    dithers,
    encode_int8,
    round_down_to_bfloat16,
    round_up_to_bfloat16,
    scales_in,
)
from fusion_p2p.compress.selecting import select
from fusion_p2p.errors import WireError
from fusion_p2p.wire.codecs import (
    BLOCK,
    MAGNITUDE_BITS,
    SCALE_BYTES,
    CodecSpec,
    kept_elements,
    num_blocks,
    packed_bytes,
    remainder_bits,
    value_bytes,
)

_SIGN = 1 << MAGNITUDE_BITS
_LEVELS = _SIGN - 1
_LEAST_EXPONENT, _GREATEST_EXPONENT = -149, 128


class SparseCoder:
    """The payloads of one sparse codec for tensors of `count` elements on `device`. WireError for payloads that are odd."""

    def __init__(self, spec: CodecSpec, count: int, device: torch.device) -> None:
        self._spec, self._count, self._device = spec, count, device
        self.kept = kept_elements(count, spec.ratio)

    def encode(self, flat: Tensor, seed: int | None) -> tuple[Tensor, Tensor] | None:
        """The payload's bytes and the places kept, of (count,) float32; None when it is not finite."""
        places = select(flat, self._spec.ratio)
        if places is None:
            return None
        values = flat[places]
        if self._spec.family == "topk-paper":
            return torch.cat((values.view(torch.uint8), places.view(torch.uint8))), places
        coded = [self._encode_largest(values, seed)]
        coded += [torch.from_numpy(part) for part in bits.encode_places(to_host(places).numpy(), self._count)]
        return torch.cat([to_host(part) for part in coded]), places

    def decode(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """The tensor (count,) float32 and the places kept."""
        if self._spec.family == "topk-paper":
            values, places = _copied(data[: 4 * self.kept], torch.float32), _copied(data[4 * self.kept :], torch.int64)
            _refuse_odd_places(places, self._count)
        else:
            size = value_bytes(self._spec.values, self.kept, masked=False)
            values = self._decode_largest(data[:size])
            places = self._decode_places(data[size:].numpy())
        places = to_device(places, self._device)
        return self.scatter(to_device(values, self._device), places), places

    def encode_masked(self, flat: Tensor, places: Tensor, seed: int | None) -> Tensor | None:
        """The bytes of a gradient (count,) at places that both sides know; None when it is not finite there."""
        values = flat[places]
        if self._spec.values == "int8":
            return encode_int8(values, seed)
        return _encode_floats(values, self._spec.values) if all_finite(values) else None

    def decode_masked(self, data: Tensor) -> Tensor:
        """The (kept,) values that `encode_masked` wrote."""
        return decode_int8(data, self.kept) if self._spec.values == "int8" else _decode_floats(data, self._spec.values)

    def scatter(self, values: Tensor, places: Tensor) -> Tensor:
        """(count,) float32 with the values at their places, and 0 elsewhere."""
        if self._device.type == "cpu":  # NumPy's zeros cost nothing until they are touched, and its scatter is faster
            dense = np.zeros(self._count, np.float32)
            dense[places.numpy()] = values.numpy()
            return torch.from_numpy(dense)
        flat = torch.zeros(self._count, device=self._device)
        flat[places] = values
        return flat

    def _decode_places(self, data: bits.Bytes) -> Tensor:
        size = packed_bytes(self.kept, remainder_bits(self._count, self.kept))
        return torch.from_numpy(bits.decode_places(data[:size], data[size:], self.kept, self._count))

    def _encode_largest(self, values: Tensor, seed: int | None) -> Tensor:
        return _encode_above_floor(values, seed) if self._spec.values == "int8" else _encode_floats(values, self._spec.values)

    def _decode_largest(self, data: Tensor) -> Tensor:
        return _decode_above_floor(data, self.kept) if self._spec.values == "int8" else _decode_floats(data, self._spec.values)


def _refuse_odd_places(places: Tensor, count: int) -> None:
    if int(places[0]) < 0 or int(places[-1]) >= count or not bool((places[1:] > places[:-1]).all()):
        raise WireError(f"sparse payload: places are not ascending below {count}")


def _copied(data: Tensor, dtype: torch.dtype) -> Tensor:
    return data.clone().view(dtype)


def encode_fp16(values: Tensor) -> Tensor | None:
    """An exponent as int16, then float16 of the values over its power of two: neither the largest nor the smallest are lost.

    None when they are not finite.
    """
    least, greatest = (float(extreme) for extreme in torch.aminmax(values))
    if not math.isfinite(least) or not math.isfinite(greatest):
        return None
    exponent = math.frexp(max(-least, greatest))[1]
    down, rest = _two_powers(-exponent)
    start = torch.tensor([exponent], dtype=torch.int16, device=values.device)
    return torch.cat((start.view(torch.uint8), (values * down).mul_(rest).half().view(torch.uint8)))


def decode_fp16(data: Tensor) -> Tensor:
    """The float32 that `encode_fp16` wrote. WireError for an exponent no float32 has, or halves that are not finite."""
    exponent, halves = int(_copied(data[:SCALE_BYTES], torch.int16)), _copied(data[SCALE_BYTES:], torch.float16).float()
    least, greatest = (float(extreme) for extreme in torch.aminmax(halves))
    if not _LEAST_EXPONENT <= exponent <= _GREATEST_EXPONENT or not -1 <= least <= greatest <= 1:
        raise WireError("payload of halves is out of range")
    up, rest = _two_powers(exponent)
    limit = torch.finfo(torch.float32).max
    return halves.mul_(up).mul_(rest).clamp_(-limit, limit)


def _two_powers(exponent: int) -> tuple[float, float]:
    """Factors whose product is 2 ** exponent; that alone may not be a float32."""
    half = exponent // 2
    return 2.0**half, 2.0 ** (exponent - half)


def _encode_floats(values: Tensor, form: str) -> Tensor:
    """Of values that are finite."""
    halves = encode_fp16(values) if form == "fp16" else None
    return values.contiguous().view(torch.uint8) if halves is None else halves


def _decode_floats(data: Tensor, form: str) -> Tensor:
    return decode_fp16(data) if form == "fp16" else _copied(data, torch.float32)


def _encode_above_floor(values: Tensor, seed: int | None) -> Tensor:
    magnitude = values.abs()
    floor = round_down_to_bfloat16(magnitude.min())
    above = torch.nn.functional.pad(magnitude - floor, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    spans = round_up_to_bfloat16(above.amax(1) / _LEVELS)
    scaled = (above / torch.where(spans == 0, 1.0, spans)[:, None]).view(-1)[: len(values)]
    rounded = scaled.round() if seed is None else (scaled + dithers(len(values), seed, values.device)).floor()
    codes = rounded.clamp_(0, _LEVELS).to(torch.int16) | (values < 0).to(torch.int16) << MAGNITUDE_BITS
    packed = torch.from_numpy(bits.pack(to_host(codes).numpy(), 1 + MAGNITUDE_BITS))
    scales = torch.cat((floor.reshape(1), spans))
    return torch.cat((to_host(bfloat16_bytes(scales)), packed))


def _decode_above_floor(data: Tensor, count: int) -> Tensor:
    size = SCALE_BYTES * (1 + num_blocks(count))
    scales = scales_in(data[:size])
    codes = torch.from_numpy(bits.unpack(data[size:].numpy(), count, 1 + MAGNITUDE_BITS).astype(np.int16))
    magnitude = (codes & _LEVELS).float()
    padded = torch.nn.functional.pad(magnitude, (0, -count % BLOCK)).view(-1, BLOCK) * scales[1:, None]
    limit = torch.finfo(torch.float32).max
    values = (padded.view(-1)[:count] + scales[0]).clamp_(max=limit)
    return torch.where((codes & _SIGN) != 0, -values, values)
