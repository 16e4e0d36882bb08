"""Codecs of edges: what they write, to the byte; what they lose; what they refuse."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusion_p2p.compress.codec import EdgeCodec
from fusion_p2p.compress.dense import type_of
from fusion_p2p.compress.selecting import select
from fusion_p2p.errors import WireError
from fusion_p2p.graph.opset import TORCH_DTYPES
from fusion_p2p.graph.schema import TensorType
from fusion_p2p.wire import codecs
from fusion_p2p.wire.codecs import accepts, effective, kept_elements, parse, payload_bytes
from fusion_p2p.wire.frames import Moment

CPU = torch.device("cpu")
DEVICES = [CPU, *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
AT = Moment(3, 2)
SPECS = (
    "none", "bf16", "fp16", "int8", "int4", "topk:4:int8", "topk:7.5:fp16", "topk:30:fp32", "topk:400:int8",
    "topk-independent:10:int8", "topk-independent:25:fp16", "topk-paper:10",
)  # fmt: skip
GOLDEN = Path(__file__).with_name("golden_codecs.json")
LIMIT = torch.finfo(torch.float32).max


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def differentiable(tensor: Tensor) -> TensorType:
    found = type_of(tensor)
    return TensorType(found.shape, found.dtype, True)


def both_ends(text: str, tensor: Tensor) -> tuple[EdgeCodec, EdgeCodec]:
    declared = differentiable(tensor)
    one, other = (EdgeCodec(parse(text), declared, tensor.device, (9, 0, 1)) for _ in range(2))
    return one, other


def crossed(text: str, tensor: Tensor) -> tuple[Tensor, bytes]:
    """The value as its reader gets it, and the payload."""
    sender, reader = both_ends(text, tensor)
    data = bytes(sender.encode_forward(AT, tensor))
    return reader.decode_forward(AT, data), data


def worth(spec: str, tensor: Tensor) -> bool:
    return effective(parse(spec), differentiable(tensor)).family != "none"


# ------------------------------------------------------------------ what is written


def golden() -> dict[str, dict[str, str]]:
    """Hexadecimal payloads of a value and of its gradient, per codec."""
    value = torch.tensor([math.sin(3.0 * place) * (1 + place % 5) for place in range(70)])
    gradient = torch.tensor([math.cos(2.0 * place) / (1 + place % 3) for place in range(70)])
    written: dict[str, dict[str, str]] = {}
    for text in SPECS:
        sender, reader = both_ends(text, value)
        forward = bytes(sender.encode_forward(AT, value))
        reader.decode_forward(AT, forward)
        written[text] = {"forward": forward.hex(), "backward": bytes(reader.encode_backward(AT, gradient)).hex()}
    return written


def test_payloads_are_those_that_other_peers_of_this_version_expect():
    assert golden() == json.loads(GOLDEN.read_text())


def bits_of(data: bytes) -> Iterator[int]:
    return (byte >> place & 1 for byte in data for place in range(8))


def taken(stream: Iterator[int], width: int) -> int:
    return sum(next(stream) << place for place in range(width))


def test_a_sparse_payload_can_be_read_bit_by_bit_as_documented():
    tensor, kept = random(1000, seed=4), 10
    received, data = crossed("topk:100:int8", tensor)
    floor, span = torch.frombuffer(bytearray(data[:4]), dtype=torch.bfloat16).tolist()
    numbers, remainders, quotients = bits_of(data[4:13]), bits_of(data[13:21]), bits_of(data[21:])
    place, expected = -1, torch.zeros(1000)
    for _ in range(kept):
        code, low, high = taken(numbers, 7), taken(remainders, 6), 0
        while not next(quotients):
            high += 1
        place += 1 + (high << 6 | low)
        expected[place] = (floor + (code & 63) * span) * (-1 if code >> 6 else 1)
    assert torch.equal(received, expected)
    assert set(expected.nonzero().flatten().tolist()) == set(tensor.abs().topk(kept).indices.tolist())


def test_int8_can_be_read_as_documented():
    tensor = random(100, seed=1)
    received, data = crossed("int8", tensor)
    scales = torch.frombuffer(bytearray(data[:4]), dtype=torch.bfloat16).tolist()
    codes = np.frombuffer(data[4:], np.int8)
    assert received.tolist() == [float(np.float32(code) * np.float32(scales[at // 64])) for at, code in enumerate(codes)]
    assert abs(int(np.abs(codes).max())) in (126, 127)


def test_the_papers_format_is_values_then_places():
    tensor = torch.zeros(40)
    tensor[[5, 30, 17, 2]] = torch.tensor([-8.0, 4.0, 2.0, 1.0])
    _, data = crossed("topk-paper:10", tensor)
    assert np.frombuffer(data[:16], np.float32).tolist() == [1.0, -8.0, 2.0, 4.0]
    assert np.frombuffer(data[16:], np.int64).tolist() == [2, 5, 17, 30]


@pytest.mark.parametrize(("count", "ratio"), [(6400, 100), (6400, 7), (999, 10), (37, 3.5)])
def test_uniform_and_adatopk_put_twelve_bytes_per_kept_element_on_the_wire(count: int, ratio: float):
    """AdaTopK keeps n / r_i elements of an edge; what crosses is what the plan announced, to the byte, in both directions."""
    tensor = random(count)
    sender, reader = both_ends(f"topk-paper:{ratio}", tensor)
    forward = sender.encode_forward(AT, tensor)
    reader.decode_forward(AT, forward)
    backward = reader.encode_backward(AT, tensor)
    assert (
        len(forward)
        == len(backward)
        == 12 * int(count / ratio)
        == codecs.forward_bytes(parse(f"topk-paper:{ratio}"), differentiable(tensor))
    )


# ------------------------------------------------------------------ every codec, every tensor


def chosen(flat: Tensor, ratio: float) -> Tensor:
    places = select(flat, ratio)
    assert places is not None
    return places


def special(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    tensor = random(*shape, seed=seed)
    match kind:
        case "equal":
            return torch.full(shape, 0.37)
        case "zero":
            return torch.zeros(shape)
        case "huge":
            return (tensor * LIMIT).clamp(-LIMIT, LIMIT)
        case "small":
            return tensor * 1e-38
        case "outliers":
            return tensor * torch.exp(4 * random(*shape, seed=seed + 1))
        case "transposed":
            return tensor.permute(tuple(reversed(range(len(shape)))))
    return tensor


def tolerance(spec: str, tensor: Tensor) -> Tensor | float:
    """How far a decoded element may be from what the mask left of it; magnitudes below 1e-38 may be lost."""
    magnitude = tensor.abs()
    match spec.split(":"):
        case ["bf16"]:
            return magnitude / 128 + 1e-37
        case ["fp16"] | [_, _, "fp16"]:
            return magnitude / 1000 + float(magnitude.max()) * 2.0**-24 + 1e-37
        case ["int8"]:
            return float(magnitude.max()) / 127 + 1e-37
        case ["int4"]:
            return float(magnitude.max()) * 1.3 + 1e-37
        case [_, _, "int8"]:
            return float(magnitude.max()) / 63 + 1e-37
    return 0.0


@pytest.mark.parametrize("device", DEVICES, ids=str)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    spec=st.sampled_from(SPECS),
    dtype=st.sampled_from(sorted(TORCH_DTYPES)),
    shape=st.lists(st.integers(0, 40), min_size=0, max_size=3).map(tuple),
    kind=st.sampled_from(["random", "equal", "zero", "huge", "small", "outliers", "transposed"]),
    seed=st.integers(0, 99),
)
def test_every_codec_takes_every_tensor(
    device: torch.device, spec: str, dtype: str, shape: tuple[int, ...], kind: str, seed: int
):
    limits = torch.finfo(TORCH_DTYPES[dtype]) if TORCH_DTYPES[dtype].is_floating_point else None
    plain = special(kind, shape, seed)
    plain = plain.clamp(limits.min, limits.max) if limits else plain.clamp(-1000, 1000)
    tensor = plain.to(TORCH_DTYPES[dtype]).to(device)
    declared = differentiable(tensor)
    received, data = crossed(spec, tensor)
    low, high = payload_bytes(parse(spec), declared, backward=False)
    assert low <= len(data) <= high <= declared.num_bytes
    assert (received.shape, received.dtype, received.device) == (tensor.shape, tensor.dtype, tensor.device)
    if not worth(spec, tensor):
        assert torch.equal(received, tensor)
        return
    exact = tensor.float().cpu().reshape(-1)
    if spec.startswith("topk"):
        exact = torch.zeros_like(exact).scatter(0, (places := largest(exact, parse(spec).ratio)), exact[places])
    assert torch.isfinite(received.float()).all()
    assert ((received.float().cpu().reshape(-1).double() - exact.double()).abs() <= tolerance(spec, exact)).all()


def largest(flat: Tensor, ratio: float) -> Tensor:
    """The places a sparse codec must keep: of equal magnitudes the first."""
    return torch.sort(flat.abs(), descending=True, stable=True).indices[: kept_elements(len(flat), ratio)].sort().values


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec != "none"])
def test_gradients_cross_as_well_and_always_with_the_same_bits(spec: str, device: torch.device):
    value, gradient = random(8, 256, device=device), random(8, 256, seed=1, device=device)
    payloads = []
    for _ in range(2):
        sender, reader = both_ends(spec, value)
        reader.decode_forward(AT, sender.encode_forward(AT, value))
        payloads.append(bytes(reader.encode_backward(AT, gradient)))
        assert accepts(parse(spec), differentiable(value), len(payloads[-1]), backward=True)
        assert torch.isfinite(sender.decode_backward(AT, payloads[-1])).all()
        assert sender.moments_kept == reader.moments_kept == 0
    assert payloads[0] == payloads[1]


# ------------------------------------------------------------------ what training relies on


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_mask_that_is_reused_gives_the_exact_gradient_of_the_masked_network(device: torch.device):
    value, weight = random(16, 64, device=device), random(64, 8, seed=1, device=device)
    sender, reader = both_ends("topk:10:fp32", value)
    received = reader.decode_forward(AT, sender.encode_forward(AT, value)).requires_grad_()
    (received @ weight).square().sum().backward()
    assert received.grad is not None
    crossed_back = sender.decode_backward(AT, reader.encode_backward(AT, received.grad))

    whole = value.clone().requires_grad_()
    mask = torch.zeros(value.numel(), device=device)
    mask[largest(value.cpu().reshape(-1), 10).to(device)] = 1
    ((whole * mask.view_as(value)) @ weight).square().sum().backward()
    assert whole.grad is not None
    assert float((crossed_back - whole.grad).norm() / whole.grad.norm()) <= 1e-6


@pytest.mark.parametrize("spec", ["int8", "int4", "topk:5:int8", "topk-independent:5:int8"])
def test_gradients_are_rounded_without_bias(spec: str):
    value = random(64, 64)
    total, rounds = torch.zeros(64, 64), 200
    for micro_batch in range(rounds):
        sender, reader = both_ends(spec, value)
        moment = Moment(1, micro_batch)
        reader.decode_forward(moment, sender.encode_forward(moment, value))
        total += sender.decode_backward(moment, reader.encode_backward(moment, value))
    exact = crossed(spec.replace("int8", "fp32"), value)[0] if spec.startswith("topk") else value
    once = sender.decode_backward(moment, both_again(spec, value, moment, sender))
    single, average = (once - exact).norm(), (total / rounds - exact).norm()
    assert average < 0.15 * single


def both_again(spec: str, value: Tensor, moment: Moment, sender: EdgeCodec) -> memoryview:
    _, reader = both_ends(spec, value)
    reader.decode_forward(moment, sender.encode_forward(moment, value))
    return reader.encode_backward(moment, value)


# ------------------------------------------------------------------ what is refused


@pytest.mark.row(30)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec != "none"])
def test_a_tensor_that_is_not_finite_is_refused_and_poisons_no_later_one(spec: str, bad: float):
    good = random(40, 50)
    value = good.clone()
    value[3, 4] = bad
    sender, reader = both_ends(spec, value)
    assert not len(sender.encode_forward(AT, value))
    assert reader.decode_forward(AT, b"").isnan().all()
    assert not len(reader.encode_backward(AT, torch.full_like(good, bad)))
    assert sender.decode_backward(AT, b"").isnan().all()
    later = Moment(4, 0)
    assert torch.isfinite(reader.decode_forward(later, sender.encode_forward(later, random(40, 50)))).all()


def test_a_gradient_for_a_value_that_was_refused_or_never_came_is_refused():
    value = random(40, 50)
    sender, reader = both_ends("topk:10:int8", value)
    reader.decode_forward(AT, sender.encode_forward(AT, value))
    gradient = bytes(reader.encode_backward(AT, value))
    sender.decode_backward(AT, gradient)
    with pytest.raises(WireError, match="has not crossed"):
        sender.decode_backward(AT, gradient)
    sender.encode_forward(AT, value * math.nan)
    with pytest.raises(WireError, match="was refused"):
        sender.decode_backward(AT, gradient)


def test_what_is_remembered_ends_with_the_step_or_with_an_explicit_nothing():
    value = random(40, 50)
    sender, _ = both_ends("topk:10:int8", value)
    for micro_batch in range(4):
        sender.encode_forward(Moment(1, micro_batch), value)
    sender.drop(Moment(1, 2))
    assert sender.moments_kept == 3
    sender.encode_forward(Moment(2, 0), value)
    sender.forget(step=1)
    assert sender.moments_kept == 1
    sender.forget(step=2)
    assert sender.moments_kept == 0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    spec=st.sampled_from([spec for spec in SPECS if spec != "none"]),
    backward=st.booleans(),
    change=st.sampled_from(["flip", "cut", "extend", "random"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_damaged_payload_is_a_wire_error_or_a_tensor_of_the_declared_type(spec: str, backward: bool, change: str, seed: int):
    value, chance = random(30, 30), np.random.default_rng(seed)
    sender, reader = both_ends(spec, value)
    data = sender.encode_forward(AT, value)
    reader.decode_forward(AT, data)
    if backward:
        data = reader.encode_backward(AT, value)
    damaged = bytearray(data)
    match change:
        case "flip":
            for place in chance.integers(0, len(damaged), 8):
                damaged[place] ^= 1 << int(chance.integers(8))
        case "cut":
            del damaged[int(chance.integers(1, len(damaged))) :]
        case "extend":
            damaged += chance.bytes(int(chance.integers(1, 20)))
        case "random":
            damaged[:] = chance.bytes(len(damaged))
    try:
        decoded = sender.decode_backward(AT, damaged) if backward else reader.decode_forward(AT, damaged)
    except WireError:
        return
    assert (decoded.shape, decoded.dtype) == (value.shape, value.dtype)
    assert change in ("flip", "random") or accepts(parse(spec), differentiable(value), len(damaged), backward=backward)


def test_memory_does_not_grow_over_two_thousand_rounds():
    value = random(32, 128)
    ends = [both_ends(spec, value) for spec in ("topk:10:int8", "int4", "topk-paper:10", "fp16", "int8")]

    def resident_after(first: int, last: int) -> int:
        for number in range(first, last):
            sender, reader = ends[number % len(ends)]
            moment = Moment(number, 0)
            reader.decode_forward(moment, sender.encode_forward(moment, value))
            sender.decode_backward(moment, reader.encode_backward(moment, value))
        gc.collect()
        return int(psutil.Process().memory_info().rss)

    begun = resident_after(0, 200)
    assert resident_after(200, 2200) - begun < 200 * value.nbytes
    assert all(end.moments_kept == 0 for pair in ends for end in pair)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden(), indent=1) + "\n")
