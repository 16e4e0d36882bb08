"""Chooses how a run is shown: a live picture on a terminal, plain lines otherwise."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console

from fusion_p2p.job.progress import RunReport, RunSnapshot
from fusion_p2p.monitor.run_lines import RunLines
from fusion_p2p.monitor.run_table import RunTable
from fusion_p2p.monitor.text import harmless

log = logging.getLogger(__name__)


@contextmanager
def open_view(stream: TextIO | None = None) -> Iterator[RunReport]:
    """The view of a run on `stream` (default: standard output)."""
    out = stream if stream is not None else sys.stdout
    console = Console(file=out)
    if not console.is_terminal:
        yield Logged(RunLines(lambda line: print(line, file=out, flush=True)))
        return
    with RunTable(console) as table:
        yield Logged(table)


class Logged:
    """A view whose lines, not its figures (they are in the metrics), are in the run's log too."""

    def __init__(self, view: RunReport) -> None:
        self._view = view

    def say(self, line: str) -> None:
        log.info("%s", harmless(line, 2000))
        self._view.say(line)

    def show(self, snapshot: RunSnapshot) -> None:
        self._view.show(snapshot)
