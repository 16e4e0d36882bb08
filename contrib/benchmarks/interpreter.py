"""What interpreting a graph costs against running the module itself: the same GPT-2 shape, one thread, interleaved pairs.

Eager is the original module under autograd; the other side is a slice executor that holds the whole graph as one slice. Both
do a forward and a backward pass of the same micro-batch, starting from the same weights. Seconds are the process's CPU time:
with one thread and no waiting that is the time it takes on a quiet machine, and other processes disturb it less.

    python contrib/benchmarks/interpreter.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fusion_p2p.execute.slice import SliceExecutor
from fusion_p2p.execute.state import SliceState
from fusion_p2p.graph.capture import capture
from fusion_p2p.graph.initial import initialise
from fusion_p2p.graph.slices import cut
from fusion_p2p.models.catalogue import build
from fusion_p2p.wire.job_messages import OptimiserSettings, TrainingSettings

PAIRS = 10
CONTEXT = 256
SHAPE = {"layers": 6, "width": 384, "heads": 6, "context": CONTEXT, "vocabulary": 256, "dropout": 0.0}
SETTINGS = TrainingSettings(seed=1, optimiser=OptimiserSettings(name="sgd"))
CPU = torch.device("cpu")


def measure(pairs: int = PAIRS, micro_batch: int = 2) -> dict[str, float]:
    """Median seconds of both sides and the overhead, a share of the eager time; torch's thread count is restored afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _compare(*_both_sides(micro_batch), pairs)
    finally:
        torch.set_num_threads(threads)


def _both_sides(micro_batch: int) -> tuple[Callable[[], float], Callable[[], float]]:
    built = build("gpt2", SHAPE)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (micro_batch, CONTEXT + 1), generator=generator)
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    graph = capture(built.module, batch, built.rules).graph
    (part,) = cut(graph, [0] * len(graph.nodes)).slices
    state = SliceState.initial(graph, part, SETTINGS, CPU, {})
    executor = SliceExecutor(graph, part, state, SETTINGS, micro_batches=1, recompute=False)
    module = build("gpt2", SHAPE, device="cpu").module
    initialise(module, built.rules, SETTINGS.seed)
    inputs = {number: batch[name] for number, name in enumerate(graph.inputs)}
    return _eager(module, batch), _interpreted(executor, inputs, graph.outputs[0])


def _eager(module: nn.Module, batch: dict[str, Tensor]) -> Callable[[], float]:
    def run() -> float:
        loss = module(**batch)
        loss.backward()
        module.zero_grad(set_to_none=True)
        return float(loss.detach())

    return run


def _interpreted(executor: SliceExecutor, inputs: dict[int, Tensor], loss: int) -> Callable[[], float]:
    def run() -> float:
        values = executor.forward(1, 0, inputs)
        executor.backward(1, 0, {})
        executor.abort_step()
        return float(values[loss])

    return run


def _compare(eager: Callable[[], float], interpreted: Callable[[], float], pairs: int) -> dict[str, float]:
    if eager() != interpreted():
        raise RuntimeError("the interpreted loss differs from the eager one: nothing to compare")
    times: list[tuple[float, float]] = []
    for number in range(pairs):
        order = (eager, interpreted) if number % 2 == 0 else (interpreted, eager)
        taken = {side: _seconds(side) for side in order}
        times.append((taken[eager], taken[interpreted]))
    return {
        "eager_s": statistics.median(first for first, _ in times),
        "interpreted_s": statistics.median(second for _, second in times),
        "interpreter_overhead": statistics.median(second / first for first, second in times) - 1,
    }


def _seconds(side: Callable[[], float]) -> float:
    begun = time.process_time()
    side()
    return time.process_time() - begun


def main() -> None:
    """Print the figures as a table."""
    for name, figure in measure().items():
        print(f"{name:<24}{figure:>10.4f}")


if __name__ == "__main__":
    main()
