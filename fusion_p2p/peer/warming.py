"""What takes seconds only the first time is done before a run waits for it.

The first use of torch's fake tensors, by which a stranger's graph is checked, loads a thousand modules. A spare that takes over
a slice, and a new coordinator that mends a plan, would do so while the run stands still.
"""

from __future__ import annotations

import logging
import threading
import time

import torch

from fusion_p2p.graph.fake import fake_tensors

logger = logging.getLogger(__name__)

AFTER_S = 1.0
"""Joining comes first."""


def warm_up_soon() -> None:
    """Begin in a moment, in a thread that no exit waits for."""
    thread = threading.Timer(AFTER_S, _warm_up)
    thread.daemon = True
    thread.start()


def _warm_up() -> None:
    begun = time.perf_counter()
    with fake_tensors():
        torch.ones(1).requires_grad_().sum()
    logger.info("ready to check graphs after %.1f s", time.perf_counter() - begun)
