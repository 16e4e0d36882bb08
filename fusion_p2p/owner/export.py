"""The trained weights as a state_dict with the model's own names."""

from __future__ import annotations

import json
import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fusion_p2p.errors import ConfigError
from fusion_p2p.graph.encoding import decode_graph
from fusion_p2p.graph.schema import Graph
from fusion_p2p.owner.checkpoint import Checkpoint, newest_checkpoint
from fusion_p2p.owner.run_folder import CHECKPOINTS, GRAPH, NAMES, UNTOUCHED, stored_config


def export_state_dict(run: Path, out: Path) -> tuple[int, int]:
    """Write the newest checkpoint of a run as safetensors; the step it is from and the number of tensors.

    Names are exactly those of the captured module's state_dict: every alias of a tied tensor has a copy of its own, and what
    the loss does not read is as it was. ConfigError when `run` is no run folder, has no whole checkpoint, or `out` cannot be
    written.
    """
    stored_config(run)
    damage: list[str] = []
    checkpoint = newest_checkpoint(run / CHECKPOINTS, damage.append)
    if checkpoint is None:
        raise ConfigError(f"{run} has no checkpoint yet")
    tensors = _named_as_the_module(run, state_dict(decode_graph((run / GRAPH).read_bytes()), checkpoint))
    part = out.with_name(f".{out.name}.part")
    try:
        save_file(tensors, part, metadata={"step": str(checkpoint.step)})
        os.replace(part, out)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write {out}: {error}") from None
    return checkpoint.step, len(tensors)


def _named_as_the_module(run: Path, trained: dict[str, Tensor]) -> dict[str, Tensor]:
    try:
        known = trained | load_file(run / UNTOUCHED)
        names = json.loads((run / NAMES).read_bytes())
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{run} does not say what its model's tensors are called: {error}") from None
    return {name: known[name] for name in names if name in known}


def state_dict(graph: Graph, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Every parameter and buffer of the graph by its names, aliases included."""
    tensors: dict[str, Tensor] = {}
    for parameter in graph.parameters:
        for name in (parameter.name, *parameter.aliases):
            tensors[name] = checkpoint.tensor(f"parameter/{parameter.name}").clone()
    return tensors
