"""What a run measured: one JSON line a step, and the loss curve drawn from it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from fusion_p2p.job.progress import RunSnapshot

Curve = list[tuple[int, float]]


class Metrics:
    """Appends a line a step; a resumed run appends to it, and the last line of a step is the valid one."""

    def __init__(self, path: Path) -> None:
        """Go on with a file; a line that a crash has torn is cut off."""
        written = path.read_bytes() if path.exists() else b""
        self._file = path.open("a", encoding="utf-8")
        self._file.truncate(written.rfind(b"\n") + 1)
        self._newest_validation: float | None = None
        self._newest_step = 0

    def append(self, snapshot: RunSnapshot, wall_s: float, norm: float | None = None) -> None:
        """Add a step. wall_s: Unix time; norm: of the gradient before clipping. A validation loss is written when it is new."""
        line = asdict(snapshot) | {"wall_s": round(wall_s, 3), "norm": norm}
        del line["copies"]  # words for people
        if snapshot.step <= self._newest_step:  # the run has gone back: what it validates is new again
            self._newest_validation = None
        self._newest_step = snapshot.step
        if snapshot.validation_loss == self._newest_validation:
            line["validation_loss"] = None
        self._newest_validation = snapshot.validation_loss
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_curves(path: Path) -> tuple[Curve, Curve]:
    """(step, loss) and (step, validation loss) of what counts in a metrics file, in order. A torn last line is left out."""
    losses: dict[int, float] = {}
    validation: dict[int, float] = {}
    newest = 0
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if line["step"] <= newest:  # the run has gone back: what came after does not count
            losses, validation = _before(losses, line["step"]), _before(validation, line["step"])
        newest = line["step"]
        if line["loss"] is not None:
            losses[line["step"]] = line["loss"]
        if line["validation_loss"] is not None:
            validation[line["step"]] = line["validation_loss"]
    return sorted(losses.items()), sorted(validation.items())


def _before(curve: dict[int, float], step: int) -> dict[int, float]:
    return {at: loss for at, loss in curve.items() if at < step}


def draw_loss(metrics: Path, picture: Path, title: str) -> None:
    """Draw the loss curve of a metrics file as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    losses, validation = read_curves(metrics)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([step for step, _ in losses], [loss for _, loss in losses], linewidth=1, label="training")
    if validation:
        axes.plot([step for step, _ in validation], [loss for _, loss in validation], marker="o", label="validation")
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.grid(alpha=0.3)
    if losses:
        axes.legend()
    part = picture.with_name(f".{picture.name}.part")
    figure.savefig(part, format="png", dpi=120)
    part.replace(picture)
