"""Entropy of a byte-bigram model: what a model must beat to have learnt more than which byte follows which."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fusion_p2p.owner.text import VOCABULARY, Bytes, Text


def bigram_nats(text: Text) -> tuple[float, float]:
    """Nats per byte on (training, validation) text of a bigram model of the training text, smoothed by adding one."""
    counts = pair_counts(text.training)
    log_probability = np.log(counts + 1.0) - np.log(counts.sum(axis=1, keepdims=True) + VOCABULARY)
    return cross_entropy(counts, log_probability), cross_entropy(pair_counts(text.validation), log_probability)


def pair_counts(text: Bytes) -> npt.NDArray[np.int64]:
    """How often each byte follows each byte: [256, 256], rows are the first of the pair."""
    pairs = text[:-1].astype(np.int64) * VOCABULARY + text[1:]
    return np.bincount(pairs, minlength=VOCABULARY * VOCABULARY).reshape(VOCABULARY, VOCABULARY)


def cross_entropy(counts: npt.NDArray[np.int64], log_probability: npt.NDArray[np.float64]) -> float:
    """Mean of -log probability over the pairs counted."""
    return float(-(counts * log_probability).sum() / counts.sum())
