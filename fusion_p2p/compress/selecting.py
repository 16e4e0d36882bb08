"""The k elements of largest magnitude, exactly, in ascending order of place; of equal ones the first are taken.

On the host a sample gives a threshold that a few more than k elements reach, and only those are partitioned: one pass over the
tensor in pieces that stay in the cache. On an accelerator the k-th largest magnitude is the threshold.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusion_p2p.wire.codecs import SELECTION_BLOCK, kept_of_block

STRIDE = 61
"""Every so many elements are looked at first; a prime, so that it does not run along one channel."""
PIECE = 1 << 16
SMALL = 1 << 14
"""Below that many elements a sample says too little."""


def select(flat: Tensor, ratio: float) -> Tensor:
    """Places (k,) int64, ascending, of what a sparse codec keeps of `flat` (n,) float32, finite; on its device."""
    blocks = torch.split(flat, SELECTION_BLOCK)
    chosen = [
        _largest(block, kept_of_block(len(block), ratio)) + number * SELECTION_BLOCK for number, block in enumerate(blocks)
    ]
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen)


def _largest(flat: Tensor, count: int) -> Tensor:
    if flat.device.type == "cpu":
        return torch.from_numpy(_largest_on_host(flat.numpy(), count))
    return _largest_on_accelerator(flat, count)


def _largest_on_accelerator(flat: Tensor, count: int) -> Tensor:
    magnitude = flat.abs()
    threshold = torch.topk(magnitude, count, sorted=False).values.min()
    above, equal = magnitude > threshold, magnitude == threshold
    above |= equal & (equal.cumsum(0) <= count - above.sum())
    return above.nonzero().squeeze(1)


def _largest_on_host(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    threshold = _safe_threshold(values, count)
    places, magnitude = _at_least(values, threshold)
    if len(places) < count:
        places, magnitude = _at_least(values, 0.0)
    cut = np.partition(magnitude, len(places) - count)[len(places) - count]
    above = magnitude > cut
    equal = np.flatnonzero(magnitude == cut)
    above[equal[: count - int(np.count_nonzero(above))]] = True
    kept: NDArray[np.int64] = places[above]
    return kept


def _safe_threshold(values: NDArray[np.float32], count: int) -> float:
    """A magnitude that at least `count` elements reach, very probably, and not many more; 0 when there is little to gain."""
    if len(values) < SMALL:
        return 0.0
    sample = np.abs(values[::STRIDE])
    expected = len(sample) * count / len(values)
    rank = int(expected + 4 * math.sqrt(expected) + 2)
    return float(np.partition(sample, len(sample) - rank)[len(sample) - rank]) if rank < len(sample) else 0.0


def _at_least(values: NDArray[np.float32], threshold: float) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Places and magnitudes of the elements that reach a threshold."""
    if threshold == 0.0:
        return np.arange(len(values)), np.abs(values)
    places = []
    scratch, reached = np.empty(PIECE, np.float32), np.empty(PIECE, np.bool_)
    for begin in range(0, len(values), PIECE):
        piece = values[begin : begin + PIECE]
        magnitude = np.abs(piece, out=scratch[: len(piece)])
        places.append(np.flatnonzero(np.greater_equal(magnitude, threshold, out=reached[: len(piece)])) + begin)
    found = np.concatenate(places)
    return found, np.abs(values[found])
