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
PIECE = 1 << 17
SMALL = 1 << 14
"""Below that many elements a sample says too little."""


def select(flat: Tensor, ratio: float) -> Tensor | None:
    """Places (k,) int64, ascending, of what a sparse codec keeps of `flat` (n,) float32; None when that is not finite."""
    chosen = []
    for number, block in enumerate(torch.split(flat, SELECTION_BLOCK)):
        places = _largest(block, kept_of_block(len(block), ratio))
        if places is None:
            return None
        chosen.append(places + number * SELECTION_BLOCK if number else places)
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen)


def _largest(flat: Tensor, count: int) -> Tensor | None:
    if flat.device.type != "cpu":
        return _largest_on_accelerator(flat, count)
    places = _largest_on_host(flat.numpy(), count)
    return None if places is None else torch.from_numpy(places)


def _largest_on_accelerator(flat: Tensor, count: int) -> Tensor | None:
    magnitude = flat.abs()
    if not bool(torch.isfinite(magnitude.max())):
        return None
    threshold = torch.topk(magnitude, count, sorted=False).values.min()
    above, equal = magnitude > threshold, magnitude == threshold
    above |= equal & (equal.cumsum(0) <= count - above.sum())
    return above.nonzero().squeeze(1)


def _largest_on_host(values: NDArray[np.float32], count: int) -> NDArray[np.int64] | None:
    found = _not_below(values, _safe_threshold(values, count))
    if len(found) < count:
        found = np.arange(len(values))
    magnitude = np.abs(values[found])
    if not np.isfinite(magnitude.max()):
        return None
    cut = np.partition(magnitude, len(found) - count)[len(found) - count]
    above = magnitude > cut
    equal = np.flatnonzero(magnitude == cut)
    above[equal[: count - int(np.count_nonzero(above))]] = True
    kept: NDArray[np.int64] = found[above]
    return kept


def _safe_threshold(values: NDArray[np.float32], count: int) -> float:
    """A magnitude that at least `count` elements reach, very probably, and not many more; 0 when there is little to gain."""
    if len(values) < SMALL:
        return 0.0
    sample = np.abs(values[::STRIDE])
    expected = len(sample) * count / len(values)
    rank = int(expected + 4 * math.sqrt(expected) + 2)
    return float(np.partition(sample, len(sample) - rank)[len(sample) - rank]) if rank < len(sample) else 0.0


def _not_below(values: NDArray[np.float32], threshold: float) -> NDArray[np.int64]:
    """Places of the elements whose magnitude is not below a threshold: NaN is among them."""
    size = min(PIECE, len(values))
    magnitude, rejected = np.empty(size, np.float32), np.empty(size, np.bool_)
    places = []
    for begin in range(0, len(values), PIECE):
        piece = values[begin : begin + PIECE]
        below = np.less(np.abs(piece, out=magnitude[: len(piece)]), threshold, out=rejected[: len(piece)])
        places.append(np.flatnonzero(np.logical_not(below, out=below)) + begin)
    return np.concatenate(places)
