"""What an edge's codec costs in bytes: the names that plans use and exact sizes, without tensors. `compress/` does the work.

A codec is written in a plan as text:

    none                          every element as it is
    bf16, fp16                    two bytes per element
    int8, int4                    blocks of 64 with one scale; int4 rotates each block first, and takes out of a large value
                                  what is known of its channels, their means and spreads
    topk:RATIO[:VALUES]           the n // RATIO largest elements; the gradient reuses the mask and sends no indices
    topk-independent:RATIO[:VALUES]   the gradient chooses its own largest elements (for comparison: it trains badly)
    topk-paper:RATIO              as before, written as float32 and int64: 12 bytes per kept element, the size AdaTopK assumes

with VALUES one of fp32, fp16, int8 (the default). Sizes are known before encoding: exactly, except that the indices of `topk`
and `topk-independent` may take less than announced. A codec never applies where it would not make every message smaller, nor
to integers, bools, scalars (losses among them) and values without a gradient (masks): those are sent dense whatever the plan
says, and both ends know that from the graph alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from fusion_p2p.errors import WireError
from fusion_p2p.graph.schema import TensorType

FAMILIES: tuple[str, ...] = ("none", "bf16", "fp16", "int8", "int4", "topk", "topk-independent", "topk-paper")
"""The codecs by name; a frame header carries the position in this table."""
SPARSE = frozenset({"topk", "topk-independent", "topk-paper"})
VALUE_FORMATS: tuple[str, ...] = ("fp32", "fp16", "int8")
BLOCK = 64
"""Elements that share a scale."""
CHANNEL_ELEMENTS = 128
"""From so many elements per channel on, `int4` sends the mean and spread of each channel of a value with it."""
SELECTION_BLOCK = 1 << 22
"""A larger tensor is divided into blocks of so many elements, and each keeps its own share: selection stays cheap."""
MAGNITUDE_BITS, SCALE_BYTES = 6, 2
PAPER_BYTES = 12
MAX_RATIO = 1e6
_FLOATS = frozenset({"float32", "float16", "bfloat16"})
_SPEC = re.compile(r"(?P<family>[a-z0-9-]{1,24})(?::(?P<ratio>\d{1,7}(?:\.\d{1,6})?))?(?::(?P<values>[a-z0-9]{1,8}))?")


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """A parsed codec. `ratio` and `values` mean something for sparse families only (1.0 and fp32 otherwise)."""

    family: str
    ratio: float = 1.0
    values: str = "fp32"

    def __str__(self) -> str:
        if self.family not in SPARSE:
            return self.family
        ratio = f"{self.ratio:.6f}".rstrip("0").rstrip(".")
        return f"{self.family}:{ratio}" if self.family == "topk-paper" else f"{self.family}:{ratio}:{self.values}"

    @property
    def reuses_mask(self) -> bool:
        """Whether the gradient is sent at the places that the forward pass kept."""
        return self.family == "topk"


NONE = CodecSpec("none")

LADDER: tuple[tuple[float, str], ...] = ((1.0, "none"), (2.0, "bf16"), (3.87, "int8"), (7.5, "int4"))
"""Codecs that leave no trace in the trained model, with the ratio by which they divide float32 bytes, least lossy first."""
SPARSE_LADDER: tuple[tuple[float, str], ...] = (
    *LADDER,
    (10.3, "topk:3:int8"),
    (16.4, "topk:5:int8"),
    (31.0, "topk:10:int8"),
    (59.0, "topk:20:int8"),
    (86.0, "topk:30:int8"),
    (164.0, "topk:60:int8"),
    (266.0, "topk:100:int8"),
)
"""The same, going on with sparse rungs; a model that was trained through them needs its sparsifier, or a finish without."""


@lru_cache(maxsize=4096)
def parse(text: str) -> CodecSpec:
    """The codec that a text names. WireError, one sentence, when there is none."""
    match = _SPEC.fullmatch(text)
    if match is None or match["family"] not in FAMILIES:
        raise WireError(f"unknown codec {text[:40]!r}; there is {', '.join(FAMILIES)}")
    family, ratio, values = match["family"], match["ratio"], match["values"]
    if family not in SPARSE:
        if ratio or values:
            raise WireError(f"codec {text[:40]!r}: {family} takes no ratio and no value format")
        return CodecSpec(family)
    if ratio is None or not 1 <= float(ratio) <= MAX_RATIO:
        raise WireError(f"codec {text[:40]!r} needs a ratio from 1 to {MAX_RATIO:.0f}, as in {family}:100")
    if family == "topk-paper":
        if values:
            raise WireError(f"codec {text[:40]!r}: topk-paper always sends float32 values")
        return CodecSpec(family, float(ratio))
    if values is not None and values not in VALUE_FORMATS:
        raise WireError(f"codec {text[:40]!r}: values are {', '.join(VALUE_FORMATS)}")
    return CodecSpec(family, float(ratio), values or "int8")


def rung_for(ratio: float, *, sparse: bool, pays: Callable[[CodecSpec], bool] = lambda spec: True) -> str:
    """The least lossy codec of the ladder that divides float32 bytes by at least `ratio`; the last rung when none does.

    Where that one does not pay, it is the last rung before it that does: never a lossier one than was asked for.
    """
    rungs = SPARSE_LADDER if sparse else LADDER
    enough = next((number for number, (reached, _) in enumerate(rungs) if reached >= ratio), len(rungs) - 1)
    return next((text for _, text in reversed(rungs[: enough + 1]) if pays(parse(text))), NONE.family)


@lru_cache(maxsize=65536)
def effective(spec: CodecSpec, type: TensorType) -> CodecSpec:
    """The codec that really carries values of a type: `spec`, or none where it does not apply or would not pay."""
    if spec.family == "none" or type.dtype not in _FLOATS or not type.grad or not type.shape or not type.num_elements:
        return NONE
    largest = max(_sizes(spec, type, backward=backward)[1] for backward in (False, True))
    return spec if largest < type.num_bytes else NONE


def forward_bytes(spec: CodecSpec, type: TensorType) -> int:
    """Payload bytes of a value: exact, or for `topk` and `topk-independent` the most there can be."""
    return payload_bytes(spec, type, backward=False)[1]


def backward_bytes(spec: CodecSpec, type: TensorType) -> int:
    """Payload bytes of its gradient, exact or the most there can be; 0 when none flows back."""
    return payload_bytes(spec, type, backward=True)[1] if type.grad else 0


def payload_bytes(spec: CodecSpec, type: TensorType, *, backward: bool) -> tuple[int, int]:
    """The least and the most bytes of a payload; the same number twice where the size is exact."""
    chosen = effective(spec, type)
    return (type.num_bytes,) * 2 if chosen.family == "none" else _sizes(chosen, type, backward=backward)


def accepts(spec: CodecSpec, type: TensorType, num_bytes: int, *, backward: bool) -> bool:
    """Whether a payload may have this size. One of a codec may also be empty: its sender refused a value that is not finite."""
    low, high = payload_bytes(spec, type, backward=backward)
    return low <= num_bytes <= high or (num_bytes == 0 and effective(spec, type).family != "none")


def kept_elements(num_elements: int, ratio: float) -> int:
    """How many elements a sparse codec keeps: n // ratio of every selection block, at least one of each."""
    full, rest = divmod(num_elements, SELECTION_BLOCK)
    return full * kept_of_block(SELECTION_BLOCK, ratio) + (kept_of_block(rest, ratio) if rest else 0)


def kept_of_block(num_elements: int, ratio: float) -> int:
    """How many elements of one selection block are kept."""
    return max(1, int(num_elements / ratio))


def remainder_bits(num_elements: int, kept: int) -> int:
    """Bits of a gap between kept elements that are written as they are; the rest of the gap is unary (a Rice code).

    One bit more pays as long as (1 - kept/n) ** (2 ** bits) > 0.618. Whole numbers only, so that all machines agree.
    """
    bits = 0
    while (kept << bits) * 20_000 < 4812 * (2 * num_elements - kept):
        bits += 1
    return bits


def unary_limit(num_elements: int, kept: int) -> int:
    """The most bits that the unary parts of all gaps can take."""
    return kept + ((num_elements - kept) >> remainder_bits(num_elements, kept))


def described_channels(type: TensorType) -> int:
    """The channels whose means and spreads `int4` sends with a value; 0 where they have too few elements to be worth it."""
    channels = type.shape[channel_dimension(type)] if type.shape else 0
    return channels if channels and type.num_elements >= CHANNEL_ELEMENTS * channels else 0


def channel_dimension(type: TensorType) -> int:
    """The dimension that counts channels: the second of images, the last of everything else."""
    return 1 if len(type.shape) == 4 else len(type.shape) - 1


def num_blocks(num_elements: int) -> int:
    """Blocks of BLOCK elements, the last one perhaps shorter."""
    return -(-num_elements // BLOCK)


def value_bytes(values: str, kept: int, *, masked: bool) -> int:
    """Bytes of `kept` values. `masked`: at the places of a reused mask, so that they may be small."""
    if values == "fp32":
        return 4 * kept
    if values == "fp16":
        return SCALE_BYTES + 2 * kept
    scales = SCALE_BYTES * num_blocks(kept)
    return scales + kept if masked else SCALE_BYTES + scales + packed_bytes(kept, 1 + MAGNITUDE_BITS)


def packed_bytes(count: int, width: int) -> int:
    """Bytes of `count` numbers of `width` bits, without gaps."""
    return (count * width + 7) // 8


def _sizes(spec: CodecSpec, type: TensorType, *, backward: bool) -> tuple[int, int]:
    """Least and most bytes of a value, or of its gradient, under a codec that applies."""
    n = type.num_elements
    match spec.family:
        case "bf16":
            return (2 * n,) * 2
        case "fp16":
            return (SCALE_BYTES + 2 * n,) * 2
        case "int8":
            return (n + SCALE_BYTES * num_blocks(n),) * 2
        case "int4":
            described = 0 if backward else 2 * SCALE_BYTES * described_channels(type)
            return (described + (BLOCK // 2 + SCALE_BYTES) * num_blocks(n),) * 2
    kept = kept_elements(n, spec.ratio)
    if spec.family == "topk-paper":
        return (PAPER_BYTES * kept,) * 2
    if backward and spec.reuses_mask:
        return (value_bytes(spec.values, kept, masked=True),) * 2
    fixed = value_bytes(spec.values, kept, masked=False) + packed_bytes(kept, remainder_bits(n, kept))
    return fixed + packed_bytes(kept, 1), fixed + packed_bytes(unary_limit(n, kept), 1)
