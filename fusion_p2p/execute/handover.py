"""Tensors that one thread makes and another goes on with.

On an accelerator the thread that codes has a stream of its own, so that copies and coding run beside compute. Whoever takes a
tensor over then lets its stream wait until the other has made it, and tells the allocator that it is used there too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Handed:
    """A tensor (or nothing) to go on with; `made` is when it is complete, None on the CPU."""

    tensor: Tensor | None
    made: torch.cuda.Event | None = None

    def take(self) -> Tensor | None:
        """The tensor, for work on this thread's stream."""
        if self.tensor is not None and self.made is not None:
            stream = torch.cuda.current_stream(self.tensor.device)
            stream.wait_event(self.made)
            self.tensor.record_stream(stream)
        return self.tensor


def hand_over(tensor: Tensor | None) -> Handed:
    """What this thread has asked its stream to make."""
    if tensor is None or not tensor.is_cuda:
        return Handed(tensor)
    made = torch.cuda.Event()  # type: ignore[no-untyped-call]
    made.record(torch.cuda.current_stream(tensor.device))
    return Handed(tensor, made)


class SideStream:
    """A stream beside the default one of a device; on the CPU there is none."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def used(self) -> Iterator[None]:
        """What this thread asks for in this context runs on the stream."""
        with torch.cuda.stream(self._stream):
            yield
