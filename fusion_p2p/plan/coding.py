"""What coding the values of an edge costs the devices at its ends: passes over the value's bytes at the device's memory rate.

Measured on one CPU core for 64 Ki to 1 Mi float32 (`contrib/benchmarks/codec.py` measures the same); a GPU has memory to match.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion_p2p.wire.codecs import CodecSpec


@dataclass(frozen=True, slots=True)
class Passes:
    """Reading or writing the value's own bytes once is one pass."""

    encode: float
    decode: float


@dataclass(frozen=True, slots=True)
class Way:
    """An edge's two ends, all in seconds per byte: the link there and back, and what a pass takes on either device."""

    forward_s: float
    backward_s: float
    sender_s: float
    reader_s: float


_BY_FAMILY = {
    "none": Passes(0.0, 0.0),
    "bf16": Passes(2.5, 2.0),
    "fp16": Passes(6.0, 6.0),
    "int8": Passes(9.0, 5.0),
    "int4": Passes(20.0, 14.0),
    "topk-paper": Passes(8.0, 2.0),
}
_WITH_CHANNELS = Passes(34.0, 17.0)
"""A value as int4: the means and spreads of its channels, too."""
_AT_KNOWN_PLACES = Passes(4.0, 4.0)
"""The gradient of a `topk` edge: no selection, no indices."""


def coding_passes(spec: CodecSpec, *, backward: bool) -> Passes:
    """What a codec that applies costs for one value, or for its gradient. Fewer kept elements are fewer indices to write."""
    if backward and spec.reuses_mask:
        return _AT_KNOWN_PLACES
    if spec.family == "int4" and not backward:
        return _WITH_CHANNELS
    return _BY_FAMILY.get(spec.family) or Passes(12.0 + 150.0 / spec.ratio, 6.0 + 140.0 / spec.ratio)


def pays(spec: CodecSpec, ratio: float, way: Way) -> bool:
    """Whether coding a value and its gradient takes less time than it saves, if the codec divides their bytes by `ratio`."""
    there, back = coding_passes(spec, backward=False), coding_passes(spec, backward=True)
    coding_s = (there.encode + back.decode) * way.sender_s + (there.decode + back.encode) * way.reader_s
    return coding_s < (1 - 1 / ratio) * (way.forward_s + way.backward_s)
