"""A run's progress as plain lines, for logs and pipes."""

from __future__ import annotations

from collections.abc import Callable

from fusion_p2p.job.progress import RunSnapshot
from fusion_p2p.monitor.text import duration, harmless, loss, num_bytes, peer_name

LINES_PER_RUN = 60


class RunLines:
    """Prints a line for the first and last step, whenever there is a new validation loss, and every so many steps."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._validation_loss: float | None = None
        self._begun = False

    def say(self, line: str) -> None:
        self._write(harmless(line, 2000))

    def show(self, snapshot: RunSnapshot) -> None:
        due = snapshot.step % max(1, snapshot.steps // LINES_PER_RUN) == 0 or snapshot.step == snapshot.steps
        if due or not self._begun or snapshot.validation_loss != self._validation_loss:
            self._write(progress_line(snapshot))
        self._begun = True
        self._validation_loss = snapshot.validation_loss


def progress_line(snapshot: RunSnapshot) -> str:
    """Everything of a snapshot in one line."""
    parts = [
        f"step {snapshot.step}/{snapshot.steps}",
        f"loss {loss(snapshot.loss)}",
        *([] if snapshot.validation_loss is None else [f"validation {loss(snapshot.validation_loss)}"]),
        f"rate {snapshot.rate:.2e}",
        f"{snapshot.step_s:.2f} s/step",
        f"{snapshot.units_per_s:,.0f} {snapshot.unit}/s",
        f"ETA {duration(snapshot.remaining_s)}",
        *(f"{peer_name(load.peer)} busy {load.busy_share:.0%} sent {num_bytes(load.bytes_sent)}" for load in snapshot.peers),
    ]
    return " | ".join(parts)
