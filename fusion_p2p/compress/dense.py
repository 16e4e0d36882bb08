"""Tensors as they are: raw little-endian bytes in row-major order, every dtype of the schema, bit-exact.

NumPy knows no bfloat16, so bytes are taken through a `uint8` view of the tensor's own memory: nothing is converted or copied
unless the tensor lies on an accelerator or is not contiguous. To and from an accelerator they go through page-locked memory, on
this thread's stream: then the bus copies by itself, at its full rate, beside compute on other streams.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion_p2p.errors import WireError
from fusion_p2p.graph.opset import TORCH_DTYPES
from fusion_p2p.graph.schema import TensorType

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def type_of(tensor: Tensor) -> TensorType:
    """What the wire says of a tensor. ValueError for a dtype that has no name there: our own fault."""
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise ValueError(f"{tensor.dtype} has no place on the wire")
    return TensorType(tuple(tensor.shape), name, tensor.requires_grad)


def all_finite(tensor: Tensor) -> bool:
    """Whether there is no NaN and no infinity: one pass without memory, as either shows in the extremes."""
    if not tensor.numel():
        return True
    least, greatest = torch.aminmax(tensor)
    return bool(torch.isfinite(least) & torch.isfinite(greatest))


def to_host(tensor: Tensor) -> Tensor:
    """The tensor on the host, complete; from an accelerator in page-locked memory, which is used again once it is dropped."""
    if not tensor.is_cuda:
        return tensor.to("cpu")
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device. An accelerator copies while this thread goes on; work on this stream comes after it."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)  # torch keeps the page-locked copy until the bus has read it


def to_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes on the host. They share its memory where they can: do not write to it while they are being sent."""
    host = to_host(tensor.detach()).contiguous()
    return host.reshape(-1).view(torch.uint8).numpy().data


def from_bytes(buffer: bytes | bytearray | memoryview, type: TensorType, device: torch.device) -> Tensor:
    """The tensor in `buffer`, whose memory it takes over when that is writable and aligned.

    WireError when the size is not that of `type`, or a bool is neither 0 nor 1.
    """
    view = memoryview(buffer).cast("B")
    if view.nbytes != type.num_bytes:
        raise WireError(f"payload of {view.nbytes} bytes is not a {type.dtype} tensor of shape {list(type.shape)}")
    dtype = TORCH_DTYPES[type.dtype]
    if not view.nbytes:
        return torch.empty(type.shape, dtype=dtype, device=device)
    flat = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
    if type.dtype == "bool" and int(flat.max()) > 1:
        raise WireError("payload has bytes other than 0 and 1 where booleans belong")
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return to_device(flat.view(dtype).reshape(type.shape), device)
