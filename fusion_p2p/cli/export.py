"""`fusion-peer export`: the trained weights as a plain safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="run folder")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="file to write; default: RUN/model.safetensors")] = None,
) -> None:
    """Write the state_dict of a run's newest checkpoint, with the model's own parameter names."""
    from fusion_p2p.owner.export import export_state_dict  # imports torch

    target = out if out is not None else run / "model.safetensors"
    step, num_tensors = export_state_dict(run, target)
    typer.echo(f"{target}: {num_tensors} tensors after step {step}")
