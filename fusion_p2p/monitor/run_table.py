"""A run's progress as a live picture for a terminal: built from one snapshot, nothing else."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fusion_p2p.job.progress import PeerLoad, RunSnapshot
from fusion_p2p.monitor.text import duration, harmless, loss, num_bytes, peer_name

MAX_PEERS_SHOWN = 20
BAR_WIDTH = 40


class RunTable:
    """Keeps the newest snapshot at the foot of the terminal; lines scroll above it. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        # Refreshed when there is something new: no thread of its own.
        self._live = Live(console=console, auto_refresh=False)

    def say(self, line: str) -> None:
        self._live.console.print(Text(harmless(line, 2000)))

    def show(self, snapshot: RunSnapshot) -> None:
        self._live.update(picture(snapshot), refresh=True)

    def __enter__(self) -> RunTable:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()


def picture(snapshot: RunSnapshot) -> RenderableType:
    """Bar, figures, and a row per peer."""
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        Text(f"step {snapshot.step}/{snapshot.steps}", style="bold"),
        ProgressBar(total=snapshot.steps, completed=snapshot.step, width=BAR_WIDTH),
        Text(f"ETA {duration(snapshot.remaining_s)}"),
    )
    return Group(bar, _figures(snapshot), _peers(snapshot.peers))


def _figures(snapshot: RunSnapshot) -> Text:
    copies = f"\n{harmless(snapshot.copies, 200)}" if snapshot.copies else ""
    return Text(
        f"loss {loss(snapshot.loss)}   validation {loss(snapshot.validation_loss)}   rate {snapshot.rate:.2e}   "
        f"{snapshot.step_s:.2f} s/step   {snapshot.units_per_s:,.0f} {snapshot.unit}/s   epoch {snapshot.epoch}{copies}"
    )


def _peers(loads: tuple[PeerLoad, ...]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in ("peer", "slices", "busy", "", "sent", "received"):
        table.add_column(heading, justify="right" if heading in ("sent", "received") else "left")
    for load in loads[:MAX_PEERS_SHOWN]:
        table.add_row(
            Text(peer_name(load.peer)),
            Text(", ".join(map(str, load.slices))[:40]),
            ProgressBar(total=1.0, completed=min(1.0, load.busy_share), width=12),
            Text(f"{load.busy_share:.0%}"),
            Text(num_bytes(load.bytes_sent)),
            Text(num_bytes(load.bytes_received)),
        )
    if len(loads) > MAX_PEERS_SHOWN:
        table.add_row(Text(f"and {len(loads) - MAX_PEERS_SHOWN} more"))
    return table
