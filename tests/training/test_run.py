from __future__ import annotations

from pathlib import Path

import pytest

from contrib.reference.loop import reference_run
from contrib.reference.modules import reference_of, relative_difference
from fusion_p2p.net.memory import SimulatedNetwork
from tests.swarm_in_memory import owner, run_config, volunteers


def thirds(graph) -> list[int]:
    count = len(graph.nodes)
    return [min(2, index * 3 // count) for index in range(count)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tied": True},
        {"optimiser": "adam", "learning_rate": 1e-3, "warmup": 3, "clip": 1.0, "tied": True},
        {"recompute": True},
    ],
    ids=["sgd", "tied", "adam-clip-tied", "recompute"],
)
async def test_three_peers_train_as_one_pytorch_loop_does(tmp_path: Path, settings) -> None:
    config = run_config(tmp_path / "run", **settings)
    async with SimulatedNetwork(seed=1) as network, volunteers(network, 3) as peers:
        async with owner(network, config, thirds, peers) as owned:
            await owned.run.finish()
    module, data = reference_of(config)
    expected = reference_run(module, data, config, steps=config.steps).losses
    assert len(owned.recorder.losses) == config.steps
    assert relative_difference(owned.recorder.losses, expected) <= 1e-6
