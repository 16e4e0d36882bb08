from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.compress.dense import all_finite, from_bytes, to_bytes, to_device, to_host, type_of
from fusion_p2p.errors import WireError
from fusion_p2p.graph.opset import TORCH_DTYPES
from fusion_p2p.graph.schema import DTYPE_BYTES, TensorType

CPU = torch.device("cpu")


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bits, so NaN payloads and negative zeros are among them."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    bits = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(shape)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    same_type = left.dtype == right.dtype and left.shape == right.shape
    return same_type and torch.equal(left.contiguous().reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


@pytest.mark.row(31)
@pytest.mark.parametrize("name", DTYPE_BYTES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 4), (2, 3, 4, 5)])
def test_bytes_round_trip_bit_exact_at_declared_size(name: str, shape: tuple[int, ...]):
    tensor = random_tensor(TORCH_DTYPES[name], shape, 7)
    data = to_bytes(tensor)
    assert data.nbytes == type_of(tensor).num_bytes
    assert same_bits(from_bytes(bytes(data), type_of(tensor), CPU), tensor)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 1000))
def test_any_shape_round_trips_also_transposed(name: str, shape: list[int], seed: int):
    tensor = random_tensor(TORCH_DTYPES[name], tuple(shape), seed).permute(*reversed(range(len(shape))))
    assert same_bits(from_bytes(bytearray(to_bytes(tensor)), type_of(tensor), CPU), tensor)


def test_contiguous_tensor_is_not_copied_in_either_direction():
    tensor = torch.arange(6.0)
    to_bytes(tensor)[0:4] = to_bytes(torch.tensor(9.0))
    assert tensor[0] == 9
    buffer = bytearray(to_bytes(tensor))
    arrived = from_bytes(buffer, type_of(tensor), CPU)
    buffer[0:4] = to_bytes(torch.tensor(3.0))
    assert arrived[0] == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_found(dtype: torch.dtype, bad: float):
    tensor = torch.ones(5, 7, dtype=dtype)
    assert all_finite(tensor)
    assert all_finite(tensor[:0])
    tensor[3, 2] = bad
    assert not all_finite(tensor)
    assert not all_finite(tensor.t())


def test_bytes_are_little_endian():
    assert bytes(to_bytes(torch.tensor([1], dtype=torch.int32))) == b"\x01\0\0\0"
    assert bytes(to_bytes(torch.tensor([1.0], dtype=torch.bfloat16))) == b"\x80\x3f"


def test_unaligned_memory_is_realigned():
    tensor = torch.arange(4.0)
    buffer = bytearray(1) + bytearray(to_bytes(tensor))
    arrived = from_bytes(memoryview(buffer)[1:], type_of(tensor), CPU)
    assert arrived.data_ptr() % 4 == 0
    assert torch.equal(arrived, tensor)


@pytest.mark.parametrize("size", [0, 23, 25, 48])
def test_wrong_size_is_refused(size: int):
    with pytest.raises(WireError, match=r"bytes is not a float32 tensor of shape \[2, 3\]"):
        from_bytes(bytes(size), TensorType((2, 3), "float32", False), CPU)


def test_booleans_are_zero_or_one():
    with pytest.raises(WireError, match="booleans"):
        from_bytes(b"\x00\x01\x02", TensorType((3,), "bool", False), CPU)


def test_dtype_without_a_name_is_refused():
    with pytest.raises(ValueError, match="no place on the wire"):
        type_of(torch.zeros(1, dtype=torch.complex64))


class OnAccelerator(torch.Tensor):
    """Behaves as a tensor of a GPU: a copy that nobody waits for has happened only once the stream is synchronised."""

    is_cuda = True  # type: ignore[assignment]
    asked: list[str]
    pending: list[Callable[[], object]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        options = kwargs or {}
        match func.__name__:
            case "copy_" if options.get("non_blocking"):
                cls.pending.append(lambda: args[0].copy_(args[1].as_subclass(torch.Tensor)))
                return args[0]
            case "pin_memory" | "to":
                cls.asked.append(f"{func.__name__} {options}")
                return args[0]
        return super().__torch_function__(func, types, args, options)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of it, in order."""
    OnAccelerator.asked, OnAccelerator.pending = asked, pending = [], []

    class Stream:
        def synchronize(self) -> None:
            asked.append("synchronize")
            while pending:
                pending.pop(0)()

    def allocated(shape: torch.Size, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        asked.append(f"empty pinned={pin_memory}")
        return torch.zeros(shape, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch, "empty", allocated)
    return asked


def test_bytes_of_an_accelerator_are_read_from_page_locked_memory_when_they_are_there(accelerator: list[str]):
    tensor = torch.arange(1.0, 13).reshape(3, 4)
    assert bytes(to_bytes(tensor.as_subclass(OnAccelerator))) == bytes(to_bytes(tensor))
    assert accelerator == ["empty pinned=True", "synchronize"]


def test_an_accelerator_reads_from_page_locked_memory_while_the_thread_goes_on(accelerator: list[str]):
    to_device(torch.ones(3).as_subclass(OnAccelerator), torch.device("cuda"))
    assert accelerator == ["pin_memory {}", "to {'non_blocking': True}"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_and_takes_bytes_through_page_locked_memory():
    tensor = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
    assert to_host(tensor).is_pinned()
    for _ in range(20):  # page-locked memory is used again, but never before it was read
        data = bytearray(to_bytes(tensor))
        taken = [from_bytes(data, type_of(tensor), tensor.device) for _ in range(4)]
        assert all(torch.equal(copy, tensor) for copy in taken)
        tensor = tensor + 1
