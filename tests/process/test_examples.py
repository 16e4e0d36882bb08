"""The examples of contrib/, run as their texts tell users to."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from contrib.benchmarks.swarm import running_swarm
from contrib.examples import two_towers
from contrib.reference.loop import reference_run
from contrib.reference.modules import config_of_run, reference_of, relative_difference
from fusion_p2p.owner.metrics import read_curves

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(180)]
STEPS = 12


def documented_command() -> list[str]:
    """The arguments of the command in the example's own text."""
    (command,) = re.findall(r"^    fusion-peer train ((?:.*\\\n)*.*)$", two_towers.__doc__ or "", re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == ["--bootstrap", "ADDRESS"]
    return words[2:]


def test_a_model_and_data_of_ones_own_train_over_two_peers_as_alone(tmp_path: Path):
    with running_swarm(tmp_path, 2) as swarm:
        run = swarm.train("example", (*documented_command(), "--steps", str(STEPS), "--peers", "2", "--validate-every", "6"))
    losses, validation = read_curves(run / "metrics.jsonl")
    config = config_of_run(run)
    alone = reference_run(*reference_of(config), config, steps=STEPS).losses
    assert relative_difference([loss for _, loss in losses], alone) < 1e-6
    assert [step for step, _ in validation][-1] == STEPS
