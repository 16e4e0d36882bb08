"""Few bits per element: blocks of 64 elements share a scale. Torch, on any device; payloads are arrays of bytes.

    scale   bfloat16: the block's largest magnitude / levels, rounded up, so that no code exceeds `levels`
    int8    scales of all blocks, then one signed byte per element (levels 127)
    int4    scales of all blocks, then 32 bytes per block, the even element in the low half of a byte: code + 7.5, where codes
            are the odd multiples of a half (levels 7.5: sixteen codes); a block with scale 0 is zeros
            each block, the last one filled up with zeros, is rotated before coding and back after decoding
    int4 of a value with many elements per channel
            means of all channels, then their spreads (mean distances from the mean, 1 where that is 0 or extreme), bfloat16
            each, then int4 of (value - mean) / spread

The rotation is the 64 x 64 Hadamard matrix over 8, whose rows have fixed random signs: it spreads an outlier over its block.
What every place of a value has in common, up to two thirds of the energy of a young transformer's activations, would take up
most of the few codes, and makes a channel that varies little vanish in the rounding of its neighbours.
Codes are rounded to nearest; with a seed they are rounded up with the probability of the remainder (stochastic rounding), by a
fixed table of dithers that the seed rotates: the same on all devices, and far cheaper than fresh random numbers.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fusion_p2p.compress.dense import all_finite
from fusion_p2p.errors import WireError
from fusion_p2p.wire.codecs import BLOCK, SCALE_BYTES, num_blocks

INT8_LEVELS, INT4_LEVELS = 127, 7.5
SIGNS = 0x9E37_79B9_7F4A_7C15
"""Bit i is set where element i of a block is negated first."""
DITHERS = 65_521
"""A prime, so that the same place of neighbouring rows never gets the same dither."""
_MOST = torch.finfo(torch.float32).max
_LARGE = 1e36
"""Scales from here on could overflow float32 in a sum of 64."""
_FAR = 1e30
"""Means and spreads of channels are below it, and spreads above its inverse, or taken for 0 and 1."""


def encode_int8(flat: Tensor, seed: int | None) -> Tensor | None:
    """Bytes of `flat` (n,) float32; None when it is not finite."""
    blocks = _filled(flat)
    peaks = blocks.abs().amax(1)
    if not all_finite(peaks):
        return None
    scales = _scales(peaks, INT8_LEVELS)
    codes = _round(blocks / scales[:, None], -INT8_LEVELS, INT8_LEVELS, seed).to(torch.int8)
    return torch.cat((bfloat16_bytes(scales), codes.reshape(-1)[: len(flat)].view(torch.uint8)))


def decode_int8(data: Tensor, count: int) -> Tensor:
    """The (count,) float32 in exactly the bytes that `encode_int8` makes. WireError when a scale is none."""
    scales = scales_in(data[: SCALE_BYTES * num_blocks(count)])
    codes = _filled(data[SCALE_BYTES * len(scales) :].view(torch.int8))
    return _products(codes, scales).reshape(-1)[:count]


def encode_int4(flat: Tensor, seed: int | None) -> Tensor | None:
    """Bytes of `flat` (n,) float32; None when it is not finite."""
    blocks = _filled(flat)
    rotated = blocks @ rotation(flat.device)
    peaks = rotated.abs().amax(1)
    if not all_finite(peaks):  # sums of 64 huge numbers are not finite either
        if not all_finite(blocks):
            return None
        rotated = _rotated_in_double(blocks, rotation(flat.device))
        peaks = rotated.abs().amax(1)
    scales = round_up_to_bfloat16(peaks / INT4_LEVELS)
    places = rotated / torch.where(scales == 0, 1.0, scales)[:, None] + INT4_LEVELS
    codes = _round(places, 0, 15, seed).to(torch.uint8)
    return torch.cat((bfloat16_bytes(scales), (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(-1)))


def decode_int4(data: Tensor, count: int) -> Tensor:
    """The (count,) float32 in exactly the bytes that `encode_int4` makes. WireError when a scale is none."""
    scales = scales_in(data[: SCALE_BYTES * num_blocks(count)])
    pairs = data[SCALE_BYTES * len(scales) :].view(-1, BLOCK // 2)
    codes = torch.stack((pairs & 15, pairs >> 4), dim=2).view(-1, BLOCK) - INT4_LEVELS
    rotated = _products(codes, scales)
    turned = rotation(data.device).t()
    blocks = _rotated_in_double(rotated, turned) if float(scales.max()) > _LARGE else rotated @ turned
    return blocks.reshape(-1)[:count]


def encode_int4_of_channels(value: Tensor) -> Tensor | None:
    """Bytes of `value` (before, channels, behind) float32; None when it is not finite."""
    means = value.mean((0, 2)).to(torch.bfloat16).float()
    means = torch.where(means.abs() < _FAR, means, 0.0)
    rest = value - means[:, None]
    spreads = rest.abs().mean((0, 2)).to(torch.bfloat16).float()
    spreads = torch.where((spreads > 1 / _FAR) & (spreads < _FAR), spreads, 1.0)
    coded = encode_int4(rest.div_(spreads[:, None]).reshape(-1), None)
    return None if coded is None else torch.cat((bfloat16_bytes(means), bfloat16_bytes(spreads), coded))


def decode_int4_of_channels(data: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """The (elements,) float32 in the bytes that `encode_int4_of_channels` makes. WireError for what is no mean or spread."""
    described = SCALE_BYTES * shape[1]
    means, spreads = _moderate(data[:described]), _moderate(data[described : 2 * described])
    rest = decode_int4(data[2 * described :], math.prod(shape)).view(shape)
    return rest.mul_(spreads[:, None]).add_(means[:, None]).reshape(-1)


@lru_cache(maxsize=8)
def rotation(device: torch.device) -> Tensor:
    """The orthogonal (64, 64) float32 that int4 turns blocks with."""
    matrix = torch.ones(1, 1)
    while len(matrix) < BLOCK:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    signs = torch.tensor([-1.0 if SIGNS >> bit & 1 else 1.0 for bit in range(BLOCK)])
    return torch.mul(matrix, signs[:, None] / 8).to(device)


def round_up_to_bfloat16(values: Tensor) -> Tensor:
    """The least bfloat16 that is not below each value (float32, not negative), as float32."""
    return _whole(values.view(torch.int32) + 0xFFFF)


def round_down_to_bfloat16(values: Tensor) -> Tensor:
    """The greatest bfloat16 that is not above each value (float32, not negative), as float32."""
    return _whole(values.view(torch.int32))


def bfloat16_bytes(values: Tensor) -> Tensor:
    """Two bytes per value that is a bfloat16 already."""
    return values.to(torch.bfloat16).view(torch.uint8)


def scales_in(data: Tensor) -> Tensor:
    """The float32 in bytes of bfloat16. WireError when one is negative or not finite."""
    scales = _from_bfloat16(data)
    if not bool(((scales >= 0) & torch.isfinite(scales)).all()):
        raise WireError("payload holds a scale that is negative or not finite")
    return scales


def _moderate(data: Tensor) -> Tensor:
    values = _from_bfloat16(data)
    if not bool((values.abs() <= _FAR).all()):
        raise WireError("payload holds a channel's mean or spread that no sender makes")
    return values


def dithers(count: int, seed: int, device: torch.device) -> Tensor:
    """(count,) float32 in [0, 1): the fixed table, begun where the seed says, over and over."""
    table, begin = _table(device), seed % DITHERS
    return table.repeat(-(-(begin + count) // DITHERS))[begin : begin + count]


@lru_cache(maxsize=8)
def _table(device: torch.device) -> Tensor:
    mixed = np.arange(1, DITHERS + 1, dtype=np.uint64) * np.uint64(SIGNS)
    for shift, factor in ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB)):  # SplitMix64
        mixed = (mixed ^ mixed >> np.uint64(shift)) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return torch.from_numpy((mixed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)).to(device)


def _filled(flat: Tensor) -> Tensor:
    """(blocks, 64), zeros behind the last element."""
    missing = -len(flat) % BLOCK
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK)


def _scales(peaks: Tensor, levels: int) -> Tensor:
    """A scale of 1 for a block of zeros: then all its codes are 0, and nothing is divided by 0."""
    scales = round_up_to_bfloat16(peaks / levels)
    return torch.where(scales == 0, 1.0, scales)


def _from_bfloat16(data: Tensor) -> Tensor:
    aligned = data if data.data_ptr() % 2 == 0 else data.clone()
    return aligned.view(torch.bfloat16).float()


def _round(scaled: Tensor, least: int, most: int, seed: int | None) -> Tensor:
    """In place."""
    if seed is None:
        return scaled.round_().clamp_(least, most)
    scaled += dithers(scaled.numel(), seed, scaled.device).view_as(scaled)
    return scaled.floor_().clamp_(least, most)


def _products(codes: Tensor, scales: Tensor) -> Tensor:
    products = codes * scales[:, None]
    return products.clamp_(-_MOST, _MOST) if float(scales.max()) > _LARGE else products


def _rotated_in_double(blocks: Tensor, turn: Tensor) -> Tensor:
    """For magnitudes whose sums would overflow."""
    return (blocks.double() @ turn.double()).clamp_(-_MOST, _MOST).float()


def _whole(bits: Tensor) -> Tensor:
    return torch.bitwise_and(bits, ~0xFFFF).view(torch.float32)
