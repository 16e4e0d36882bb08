"""Where log lines of a command go: to stderr, one line each, the libraries' chatter only when something is wrong."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
CHATTY = ("hivemind", "libp2p", "matplotlib", "asyncio")


class TerminalLog(logging.StreamHandler[TextIO]):
    """Writes to whatever sys.stderr is at that moment: a live picture replaces it, so that lines scroll above it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure_logging(level: str) -> None:
    """Show `level` and above on stderr; libraries only errors, unless the level is debug. Run folders keep INFO and above."""
    shown = logging.getLevelNamesMapping()[level.upper()]
    terminal = TerminalLog()
    terminal.setLevel(shown)
    logging.basicConfig(level=shown, format=FORMAT, handlers=[terminal], force=True)
    logging.getLogger("fusion_p2p").setLevel(min(shown, logging.INFO))
    # hivemind installs its own console handler when it is imported; this variable is its only switch.
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "DEBUG" if level == "debug" else "ERROR")
    if level != "debug":
        for name in CHATTY:
            logging.getLogger(name).setLevel(logging.ERROR)
        # A traceback for every operator that a capture refuses, besides our sentence. torch resets its levels, not its filters.
        logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda record: False)
