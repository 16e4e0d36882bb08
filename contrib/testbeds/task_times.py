"""How long tasks take, noted in one run and kept in later ones, so that these differ only by what they are to compare.

A small task of a peer that is slowed twenty times takes twenty times what the caches and the clock of this machine did to it.
In a folder that nobody has settled, each process notes the processor seconds of its tasks; after `settle` every task of a kind
takes the median of its kind.
"""

from __future__ import annotations

import json
import os
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

SETTLED = "settled.json"
NOTES = ".notes"


class TaskTimes:
    """The times of this process's tasks, in a folder that all processes of a run share."""

    def __init__(self, folder: Path) -> None:
        settled = folder / SETTLED
        self._settled: dict[str, float] = json.loads(settled.read_text()) if settled.exists() else {}
        self._notes = folder / f"{os.getpid()}{NOTES}"

    def __call__(self, used_s: float, tasks: Any, task: Any, *_: Any) -> float:
        """What a task of `SliceTasks` takes that has used so many processor seconds."""
        kind = f"{tasks._edges.slice} {task.kind.value}"
        if not self._settled:
            with self._notes.open("a") as notes:
                print(kind, used_s, file=notes)
        return self._settled.get(kind, used_s)


def settle(folder: Path) -> dict[str, float]:
    """Keep what was noted. The processor seconds of each kind of task of each slice, as "0 F"."""
    noted: dict[str, list[float]] = defaultdict(list)
    for path in folder.glob(f"*{NOTES}"):
        for line in path.read_text().splitlines():
            kind, used_s = line.rsplit(" ", 1)
            noted[kind].append(float(used_s))
    medians = {kind: statistics.median(times) for kind, times in noted.items()}
    (folder / SETTLED).write_text(json.dumps(medians), encoding="utf-8")
    return medians
