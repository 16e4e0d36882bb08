"""Hostile input by the tens of thousands: graphs, frames and messages, each decoded, checked and (graphs that pass) executed.

The generators are those of `tests/fuzz`; here they run longer. Every input must be taken or refused by one of our
typed errors, and memory must stay bounded.
"""

from __future__ import annotations

import resource
import time
import warnings

import torch
from rich.console import Console
from rich.table import Table

from tests.fuzz.graph_mutation import Outcome, fuzz
from tests.fuzz.hostile_bytes import attack_frames, attack_messages

GRAPHS = 12_000
FRAMES = 16_000
MESSAGES = 16_000
SEED = 2026


def measure() -> dict[str, float]:
    """`fuzz_inputs`, `fuzz_unexpected` and how long and how much memory it took; prints a table."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begin, before = time.monotonic(), _peak_bytes()
    frames, messages = attack_frames(FRAMES, SEED), attack_messages(MESSAGES, SEED)
    graphs = fuzz(GRAPHS, SEED)
    ran = graphs.outcomes[Outcome.RAN] + graphs.outcomes[Outcome.REFUSED_AT_RUN]
    table = Table(title="hostile input", title_justify="left")
    for heading in ("kind", "inputs", "refused", "taken", "unexpected"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    table.add_row("graphs", *map(str, (graphs.inputs, graphs.outcomes[Outcome.REFUSED], ran, len(graphs.unexpected))))
    for name, outcome in (("frames", frames), ("messages", messages)):
        table.add_row(name, *map(str, (outcome.inputs, outcome.refused, outcome.accepted, len(outcome.unexpected))))
    Console(width=100, highlight=False).print(table)
    unexpected = [*(str(found) for found in graphs.unexpected), *frames.unexpected, *messages.unexpected]
    for line in unexpected[:10]:
        print(line)
    return {
        "fuzz_inputs": graphs.inputs + frames.inputs + messages.inputs,
        "fuzz_unexpected": len(unexpected),
        "fuzz_seconds": round(time.monotonic() - begin, 1),
        "fuzz_peak_mebibytes": round((_peak_bytes() - before) / 2**20, 1),
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
