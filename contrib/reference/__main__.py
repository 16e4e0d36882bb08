"""`python -m contrib.reference CONFIG.toml --steps N`: the plain loop of a run's configuration; prints one JSON object."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch

from contrib.reference.loop import reference_run
from contrib.reference.modules import reference_of
from fusion_p2p.config import TrainConfig, resolve


def main() -> None:
    """Read the configuration of `fusion-peer train`, run its loop on one thread, print losses and the end of every step."""
    parser = argparse.ArgumentParser(prog="python -m contrib.reference")
    parser.add_argument("config", type=Path, help="TOML file as a run folder holds it")
    parser.add_argument("--steps", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    config = resolve(TrainConfig, {}, {}, [given.config])
    module, data = reference_of(config)
    curve = reference_run(module, data, config, steps=given.steps)
    units = data.units_per_micro_batch * config.micro_batches
    print(json.dumps(dataclasses.asdict(curve) | {"units_per_step": units}))


if __name__ == "__main__":
    main()
