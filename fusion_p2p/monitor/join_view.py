"""What a volunteer sees: one line whenever something changes, nothing while nothing does."""

from __future__ import annotations

import time
from collections.abc import Callable

from fusion_p2p.job.progress import PeerSample
from fusion_p2p.monitor.metrics_page import MetricsPage
from fusion_p2p.monitor.text import harmless


class JoinView:
    """Prints lines with the time of day; a state is printed when it differs from the last one."""

    def __init__(
        self, write: Callable[[str], None], now: Callable[[], float] = time.time, page: MetricsPage | None = None
    ) -> None:
        """`page` serves the numbers, if anybody wants them."""
        self._page = page
        self._write = write
        self._now = now
        self._state = ""

    def say(self, line: str) -> None:
        """Something happened."""
        self._write(f"{time.strftime('%H:%M:%S', time.localtime(self._now()))} {harmless(line, 1000)}")

    def state(self, text: str) -> None:
        """What this peer is doing now, such as `standby: ...` or `training: slices 0, 2 of job ...`."""
        if text != self._state:
            self._state = text
            self.say(text)

    def measured(self, sample: PeerSample) -> None:
        """The numbers of this moment."""
        if self._page is not None:
            self._page.show(sample)
