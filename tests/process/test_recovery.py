"""A short chaos: peers are killed and drained, the coordinator is killed; the run has the bits of an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest

from contrib.chaos.places import Loopback
from contrib.chaos.population import populated
from contrib.chaos.schedule import Fault, Kind
from contrib.chaos.trial import differing, disturbed, show, undisturbed
from tests.process.swarm_of_processes import EXIT_S, no_traceback, wait_until_gone

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(180)]

SLICES = 3
PEERS = SLICES + 2
SLOWER = 6.0
STEPS = 90
"""So many that the last fault falls into the run on a fast machine, too."""
RUN_S = 90.0
MODEL = (
    "--model", "gpt2", "--layers", "4", "--width", "64", "--heads", "4", "--context", "32", "--batch-size", "8",
    "--micro-batches", "4", "--learning-rate", "1e-3", "--clip", "1.0", "--seed", "5", "--steps", str(STEPS),
    "--scheduler", "equal-compute", "--peers", str(SLICES), "--validate-every", "0", "--checkpoint-every", "20",
)  # fmt: skip
FAULTS = (
    Fault(2.0, Kind.KILL, pick=0.5),
    Fault(6.0, Kind.JOIN, pick=0.0),
    Fault(8.0, Kind.COORDINATOR, pick=0.0),
    Fault(16.0, Kind.DRAIN, pick=0.9),
)


@pytest.mark.row(12)
@pytest.mark.row(17)
def test_a_run_survives_kills_and_a_drain_with_the_bits_of_an_undisturbed_one(tmp_path: Path):
    with populated(Loopback(), tmp_path, PEERS, slower=SLOWER) as population:
        quiet, loud = tmp_path / "undisturbed", tmp_path / "disturbed"
        undisturbed(population, quiet, MODEL, RUN_S)
        outcome = disturbed(population, loud, MODEL, FAULTS, RUN_S, print)
        programs = population.programs()
        for one in population.living:
            no_traceback(one.program)
    show(outcome, "what faults cost")
    assert [one.fault.kind for one in outcome.done] == [fault.kind for fault in FAULTS]
    assert outcome.drained == (0,)
    assert sum(one.epochs for one in outcome.of(Kind.KILL)) >= 1
    assert [one.steps_repeated for one in outcome.of(Kind.DRAIN)] == [0]
    assert differing(quiet, loud) == []
    assert not wait_until_gone([program.session for program in programs], EXIT_S)
