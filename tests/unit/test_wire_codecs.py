from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.errors import WireError
from fusion_p2p.graph.schema import TensorType
from fusion_p2p.wire import codecs
from fusion_p2p.wire.codecs import (
    FAMILIES,
    LADDER,
    NONE,
    SPARSE_LADDER,
    CodecSpec,
    accepts,
    backward_bytes,
    effective,
    forward_bytes,
    parse,
    payload_bytes,
    remainder_bits,
    rung_for,
)

BIG = TensorType((1024, 1600), "float32", True)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("none", NONE),
        ("int4", CodecSpec("int4")),
        ("topk:16", CodecSpec("topk", 16.0, "int8")),
        ("topk:2.5:fp16", CodecSpec("topk", 2.5, "fp16")),
        ("topk-independent:10:fp32", CodecSpec("topk-independent", 10.0, "fp32")),
        ("topk-paper:300", CodecSpec("topk-paper", 300.0)),
    ],
)
def test_specs_are_read_and_written(text: str, spec: CodecSpec):
    assert parse(text) == spec
    assert parse(str(spec)) == spec


@pytest.mark.parametrize(
    "text",
    ["", "zip", "topk", "topk:0", "topk:0.5", "topk:1e3", "topk:10:int4", "topk:10:int8:x", "int8:2", "none:1",
     "topk-paper:3:fp16", "topk:nan", "topk:9999999", "topk:10 ", "TOPK:10", "topk:-3", "x" * 200],
)  # fmt: skip
def test_what_is_no_codec_is_one_sentence(text: str):
    with pytest.raises(WireError, match=r"codec"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "forward", "backward"),
    [
        ("none", 4000, 4000),
        ("bf16", 2000, 2000),
        ("fp16", 2002, 2002),
        ("int8", 1000 + 2 * 16, 1000 + 2 * 16),
        ("int4", 34 * 16, 34 * 16),
        ("topk-paper:100", 12 * 10, 12 * 10),
        ("topk-paper:7", 12 * 142, 12 * 142),
        # 10 kept: 6 remainder bits each, at most 10 + (990 >> 6) = 25 unary bits
        ("topk:100:fp32", 8 + 4 + 40, 40),
        ("topk:100:fp16", 8 + 4 + 22, 22),
        # a floor, one scale, 10 x 7 bits; the gradient: one scale, 10 bytes
        ("topk:100:int8", 8 + 4 + 2 + 2 + 9, 12),
        ("topk-independent:100:int8", 8 + 4 + 2 + 2 + 9, 8 + 4 + 2 + 2 + 9),
    ],
)
def test_sizes_computed_by_hand(text: str, forward: int, backward: int):
    type_ = TensorType((10, 100), "float32", True)
    assert (forward_bytes(parse(text), type_), backward_bytes(parse(text), type_)) == (forward, backward)


@pytest.mark.parametrize(
    ("shape", "described"), [((2, 64, 96), 96), ((127, 96), 0), ((32, 8, 16, 16), 8), ((4096,), 0)], ids=str
)
def test_int4_describes_channels_that_have_many_elements(shape: tuple[int, ...], described: int):
    type_ = TensorType(shape, "float32", True)
    plain = 34 * codecs.num_blocks(type_.num_elements)
    assert forward_bytes(parse("int4"), type_) == plain + 4 * described
    assert backward_bytes(parse("int4"), type_) == plain


@pytest.mark.parametrize(
    "type_",
    [
        TensorType((8, 128), "int64", True),
        TensorType((8, 128), "bool", True),
        TensorType((8, 128), "float32", False),
        TensorType((), "float32", True),
        TensorType((0, 5), "float32", True),
    ],
    ids=["integers", "bools", "masks", "scalars", "empty"],
)
def test_what_must_not_be_compressed_is_sent_as_it_is(type_: TensorType):
    for family in FAMILIES:
        spec = parse(f"{family}:10" if family in codecs.SPARSE else family)
        assert effective(spec, type_) == NONE
        assert forward_bytes(spec, type_) == type_.num_bytes
        assert not accepts(spec, type_, type_.num_bytes + 1, backward=False)


def test_dense_wherever_coding_would_not_be_smaller():
    # 12 bytes of every third element are the 4 bytes of each
    assert effective(parse("topk-paper:3"), TensorType((3000,), "float32", True)) == NONE
    assert effective(parse("topk-paper:3.01"), BIG) != NONE
    half = TensorType((6000,), "bfloat16", True)
    assert effective(parse("bf16"), half) == NONE
    assert effective(parse("topk-paper:6"), half) == NONE
    assert effective(parse("int4"), TensorType((3,), "float32", True)) == NONE


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 1 << 23), st.sampled_from(FAMILIES), st.floats(1, 5000), st.sampled_from(codecs.VALUE_FORMATS))
def test_no_message_is_ever_larger_than_dense(count: int, family: str, ratio: float, values: str):
    text = (
        family
        + (f":{ratio:.3f}" if family in codecs.SPARSE else "")
        + (f":{values}" if family in ("topk", "topk-independent") else "")
    )
    type_ = TensorType((count,), "float32", True)
    for backward in (False, True):
        low, high = payload_bytes(parse(text), type_, backward=backward)
        assert 0 < low <= high <= type_.num_bytes


def test_rungs_of_the_ladder_keep_their_ratio_and_the_least_lossy_is_taken():
    for reached, text in SPARSE_LADDER:
        spec = parse(text)
        assert 2 * BIG.num_bytes / (forward_bytes(spec, BIG) + backward_bytes(spec, BIG)) >= reached
        assert rung_for(reached, sparse=True) == text
    assert [rung_for(ratio, sparse=False) for ratio in (0.5, 1.5, 3, 5, 80)] == ["none", "bf16", "int8", "int4", "int4"]
    assert [rung_for(ratio, sparse=True) for ratio in (8, 16, 30, 1e9)] == [
        "topk:3:int8",
        "topk:5:int8",
        "topk:10:int8",
        "topk:100:int8",
    ]
    assert SPARSE_LADDER[: len(LADDER)] == LADDER


def test_a_rung_that_does_not_pay_is_not_taken():
    assert rung_for(16, sparse=True, pays=lambda spec: spec.family not in codecs.SPARSE) == "int4"
    assert rung_for(3, sparse=True, pays=lambda spec: spec.family != "int8") == "bf16"
    assert rung_for(16, sparse=True, pays=lambda spec: False) == "none"


@pytest.mark.parametrize("ratio", [2, 3, 5, 10, 30, 100, 300, 1000, 10_000])
def test_the_rice_parameter_is_the_best_one(ratio: int):
    n, k = ratio * 1000, 1000
    stay = 1 - k / n
    cost = {bits: bits + 1 / (1 - stay ** (1 << bits)) for bits in range(20)}
    assert cost[remainder_bits(n, k)] <= min(cost.values()) * 1.0001
    entropy = -(math.log2(k / n) * k / n + math.log2(stay) * stay) * ratio
    assert cost[remainder_bits(n, k)] <= 1.03 * entropy
