"""Chooses how a run is shown: a live picture on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console

from fusion_p2p.job.progress import RunReport
from fusion_p2p.monitor.run_lines import RunLines
from fusion_p2p.monitor.run_table import RunTable


@contextmanager
def open_view(stream: TextIO | None = None) -> Iterator[RunReport]:
    """The view of a run on `stream` (default: standard output)."""
    out = stream if stream is not None else sys.stdout
    console = Console(file=out)
    if not console.is_terminal:
        yield RunLines(lambda line: print(line, file=out, flush=True))
        return
    with RunTable(console) as table:
        yield table
