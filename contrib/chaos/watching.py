"""Watches a ledger grow: every line with the time at which it was first seen."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from contrib.chaos.aftermath import Noted

LOOK_S = 0.02


class LedgerWatch:
    """Reads what is appended to a ledger, in a thread of its own, while the block runs. Times are of `time.monotonic`."""

    def __init__(self, run: Path) -> None:
        self._path = run / "ledger.jsonl"
        self._noted: list[Noted] = []
        self._news = threading.Condition()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"ledger of {run.name}", daemon=True)

    @property
    def noted(self) -> tuple[Noted, ...]:
        """All lines seen so far, in order."""
        with self._news:
            return tuple(self._noted)

    def wait_for(self, wanted: Callable[[Noted], bool], timeout_s: float, *, after_s: float = 0.0) -> Noted | None:
        """The first line that is as wanted and was seen after this time; None when none comes within `timeout_s`."""
        deadline, seen = time.monotonic() + timeout_s, 0
        with self._news:
            while True:
                for one in self._noted[seen:]:
                    if one.at_s > after_s and wanted(one):
                        return one
                seen = len(self._noted)
                left = deadline - time.monotonic()
                if left <= 0 or not self._news.wait(left):
                    return None

    def _watch(self) -> None:
        position, rest = 0, b""
        while not self._ended.wait(LOOK_S):
            if not self._path.exists():
                continue
            with self._path.open("rb") as ledger:
                ledger.seek(position)
                new = ledger.read()
            now, position = time.monotonic(), position + len(new)
            *lines, rest = (rest + new).split(b"\n")
            if lines:
                self._note(now, lines)

    def _note(self, now: float, lines: list[bytes]) -> None:
        with self._news:
            self._noted += [Noted(now, json.loads(line)) for line in lines]
            self._news.notify_all()

    def __enter__(self) -> LedgerWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(5.0)
