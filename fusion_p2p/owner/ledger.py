"""The ledger of a run: what counts. One JSON line per fact, on the disk before anyone is told of it.

    opened      an owner process began (or resumed) the run: its incarnation
    start       an epoch runs; the slices' state is that after step `state_step`; its plan, and the codecs of its edges in order
    commit      a step counts, with this clip coefficient and learning rate
    skip        a step does not count (its loss or gradient was not finite)
    checkpoint  the state after a step is on the owner's disk
    end         the last step was made

The valid history is the last line of each step; a `start` after step t takes back everything after t.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from fusion_p2p.errors import ConfigError
from fusion_p2p.wire.messages import Count, DigestText, JobName, PeerName, Record, Text

Finite = Annotated[float, Field(allow_inf_nan=False)]


class Opened(Record):
    kind: Literal["opened"] = "opened"
    job: JobName
    incarnation: Count


class Start(Record):
    kind: Literal["start"] = "start"
    epoch: Count
    state_step: Count
    plan: DigestText
    coordinator: PeerName
    term: Count
    codecs: tuple[Text, ...] = ()


class Commit(Record):
    kind: Literal["commit"] = "commit"
    epoch: Count
    step: Count
    clip: Finite
    rate: Finite
    loss: Finite


class Skip(Record):
    kind: Literal["skip"] = "skip"
    epoch: Count
    step: Count


class CheckpointWritten(Record):
    kind: Literal["checkpoint"] = "checkpoint"
    step: Count


class End(Record):
    kind: Literal["end"] = "end"
    step: Count


Entry = Opened | Start | Commit | Skip | CheckpointWritten | End
_ENTRY: TypeAdapter[Entry] = TypeAdapter(Annotated[Entry, Field(discriminator="kind")])


@dataclass(slots=True)
class History:
    """What the lines of a ledger come to. `fates` holds the valid line of every step, in order."""

    opened: Opened | None = None
    start: Start | None = None
    fates: dict[int, Commit | Skip] = field(default_factory=dict)
    checkpoint_step: int = 0
    ended: bool = False
    _before: int = 0

    @property
    def step(self) -> int:
        """The last step whose fate is known; 0 before the first."""
        return max(self.fates, default=self.start.state_step if self.start else 0)

    @property
    def skips(self) -> int:
        """How many of the last steps were skipped, in a row, since the run was opened."""
        newest_first = (self.fates[step] for step in sorted(self.fates, reverse=True))
        return sum(1 for _ in takewhile(lambda fate: isinstance(fate, Skip) and fate.epoch > self._before, newest_first))

    def add(self, entry: Entry) -> None:
        match entry:
            case Opened():
                self.opened = entry
                self._before = self.start.epoch if self.start is not None else 0
            case Start():
                self.start = entry
                self.fates = {step: fate for step, fate in self.fates.items() if step <= entry.state_step}
            case Commit() | Skip():
                self.fates[entry.step] = entry
            case CheckpointWritten():
                self.checkpoint_step = entry.step
            case End():
                self.ended = True


class Ledger:
    """Appends entries durably. Use as a context manager or call `close`."""

    def __init__(self, path: Path) -> None:
        """Read what is there. A torn last line (a crash while it was written) is cut off; ConfigError for any other damage."""
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        self.history = History()
        for entry in _decode(path, whole.splitlines()):
            self.history.add(entry)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._descriptor, len(whole))
        os.lseek(self._descriptor, 0, os.SEEK_END)

    def append(self, entry: Entry) -> None:
        """Write one line; when this returns it is on the disk."""
        line = entry.model_dump_json().encode() + b"\n"
        while line:
            line = line[os.write(self._descriptor, line) :]
        os.fsync(self._descriptor)
        self.history.add(entry)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_ledger(path: Path) -> History:
    """The history in a ledger that another process may be writing. ConfigError when it is damaged."""
    content = path.read_bytes() if path.exists() else b""
    history = History()
    for entry in _decode(path, content[: content.rfind(b"\n") + 1].splitlines()):
        history.add(entry)
    return history


def _decode(path: Path, lines: Sequence[bytes]) -> list[Entry]:
    entries: list[Entry] = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(_ENTRY.validate_json(line, strict=True))
        except ValidationError:
            raise ConfigError(f"{path}: line {number} is no ledger entry; restore the run folder from a copy") from None
    return entries
