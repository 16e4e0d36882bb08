"""The newest checkpoint of a run, as the last resort of who needs a state: read and verified when somebody does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from fusion_p2p.compress.dense import to_bytes
from fusion_p2p.owner.checkpoint import Checkpoint, newest_checkpoint
from fusion_p2p.wire.blob_messages import FetchTensor


class KeptCheckpoints:
    """Serves the tensors of one checkpoint: the one that the run was opened with, or the newest that was read since."""

    def __init__(self, folder: Path, opened: Checkpoint | None, say: Callable[[str], None]) -> None:
        self._folder, self._checkpoint, self._say = folder, opened, say
        self._read: tuple[int, int] | None = None

    def step(self, written: int) -> int:
        """The step to go back to at worst: the one that was written last, unless it was found to be damaged."""
        return self._read[1] if self._read is not None and self._read[0] == written else written

    async def read(self, written: int) -> int:
        """Read the newest one that is whole, once after each that is written. Its step, 0 when there is none."""
        if self._read is None or self._read[0] != written:
            checkpoint = await asyncio.to_thread(newest_checkpoint, self._folder, self._say)
            self._checkpoint, self._read = checkpoint, (written, 0 if checkpoint is None else checkpoint.step)
        return self._read[1]

    async def tensor(self, asked: FetchTensor) -> memoryview | None:
        """The bytes of one tensor, read from the disk; None when it is not of this checkpoint."""
        checkpoint = self._checkpoint
        if checkpoint is None or asked.step != checkpoint.step or asked.name not in checkpoint.names:
            return None
        return to_bytes(await asyncio.to_thread(checkpoint.tensor, asked.name))
