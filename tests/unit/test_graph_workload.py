"""Costs by formula and by fake tensors, against what torch counts and keeps for real."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from fusion_p2p.graph.capture import capture
from fusion_p2p.graph.kinds import ATTENTION, CONVOLUTION, KINDS, MATMUL, MEMORY
from fusion_p2p.graph.workload import saved_bytes, workload
from fusion_p2p.models.catalogue import build


def gpt2(dropout: float) -> tuple[nn.Module, dict[str, Tensor]]:
    options = {"layers": 2, "width": 32, "heads": 4, "context": 16, "vocabulary": 61, "dropout": dropout}
    ids = torch.zeros(2, 16, dtype=torch.int64)
    return build("gpt2", options, device="cpu").module, {"tokens": ids, "targets": ids}


def resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    images = torch.zeros(2, 1, 16, 16, dtype=torch.uint8)
    return build("resnet", device="cpu").module, {"images": images, "labels": torch.zeros(2, dtype=torch.int64)}


def really_saved(module: nn.Module, feeds: Mapping[str, Tensor]) -> int:
    """Bytes that a real forward pass keeps for its backward, parameters and buffers aside."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(**feeds)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(("module", "feeds"), [gpt2(0.0), gpt2(0.1), resnet()], ids=["gpt2", "gpt2 with dropout", "resnet"])
def test_saved_bytes_equal_a_real_forward_pass(module: nn.Module, feeds: dict[str, Tensor]) -> None:
    costs = workload(capture(module, feeds).graph)
    # The module's BatchNorm keeps its own buffers; a graph's keeps the copies that it updates.
    statistics = sum(tensor.nbytes for name, tensor in module.named_buffers() if "running" in name)
    expected = really_saved(module, feeds) + statistics
    assert sum(cost.saved_bytes for cost in costs) == expected
    assert saved_bytes(costs, range(len(costs))) == expected


@pytest.mark.parametrize(("module", "feeds"), [gpt2(0.1), resnet()], ids=["gpt2", "resnet"])
def test_flops_equal_torchs_count(module: nn.Module, feeds: dict[str, Tensor]) -> None:
    """With dropout, attention takes the path of separate matrix products, which torch's counter sees."""
    costs = workload(capture(module, feeds).graph)
    counted = [cost for cost in costs if cost.kind != MEMORY]
    with FlopCounterMode(display=False) as counter:
        loss = module(**feeds)
        forward = counter.get_total_flops()
        loss.backward()
    assert sum(cost.forward_flops for cost in counted) == forward
    assert sum(cost.forward_flops + cost.backward_flops for cost in counted) == counter.get_total_flops()


def test_flops_do_not_depend_on_how_attention_is_computed() -> None:
    fused, separate = (workload(capture(*gpt2(dropout)).graph) for dropout in (0.0, 0.1))
    assert [sum(cost.forward_flops for cost in costs if cost.kind == ATTENTION) for costs in (fused, separate)] == [
        2 * 4 * 2 * 4 * 16 * 16 * 8
    ] * 2


def test_known_size_of_resnet_101() -> None:
    built = build("resnet101")
    feeds = {"images": torch.zeros(1, 3, 224, 224), "labels": torch.zeros(1, dtype=torch.int64)}
    costs = workload(capture(built.module, feeds, built.rules).graph)
    assert sum(cost.forward_flops for cost in costs) == pytest.approx(2 * 7.8e9, rel=0.01)
    assert {cost.kind for cost in costs} == {CONVOLUTION, MATMUL, MEMORY}


def test_one_node_of_each_kind() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3, 3, 3))
            self.table = nn.Parameter(torch.ones(1000, 8))

        def forward(self, images: Tensor, ids: Tensor) -> Tensor:
            up = functional.conv_transpose2d(functional.conv2d(images, self.weight), self.weight)
            rows = functional.embedding(ids, self.table)
            return up.square().sum() + (rows @ rows.t()).sum()

    feeds = {"images": torch.ones(1, 3, 8, 8), "ids": torch.zeros(5, dtype=torch.int64)}
    graph = capture(Mixed(), feeds).graph
    costs = {node.op: cost for node, cost in zip(graph.nodes, workload(graph), strict=True)}
    convolution, transposed = costs["conv2d"], costs["conv_transpose2d.input"]
    assert convolution.forward_flops == 2 * (2 * 6 * 6) * (3 * 3 * 3)
    assert convolution.backward_flops == convolution.forward_flops  # the images need no gradient
    assert transposed.forward_flops == convolution.forward_flops
    assert transposed.backward_flops == 2 * transposed.forward_flops
    assert costs["matmul"].forward_flops == 2 * 5 * 5 * 8
    assert costs["embedding"].bytes_moved == 2 * 5 * 8 * 4  # the rows, not the table
    assert (costs["t"].forward_flops, costs["t"].bytes_moved) == (0, 0)
    assert costs["square"].bytes_moved == 2 * 3 * 8 * 8 * 4
    assert {cost.kind for cost in costs.values()} <= set(KINDS)
