from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest
import torch

from fusion_p2p.execute.compute import ComputeThread


def test_calls_run_in_order_in_one_other_thread():
    compute = ComputeThread()
    seen: list[tuple[int, int]] = []
    futures = [compute.submit(lambda n=n: seen.append((n, threading.get_ident()))) for n in range(50)]
    for future in futures:
        future.result(timeout=5)
    assert [n for n, _ in seen] == list(range(50))
    assert {ident for _, ident in seen} != {threading.get_ident()}
    assert len({ident for _, ident in seen}) == 1
    assert compute.close()


def test_result_and_error_reach_whoever_waits():
    compute = ComputeThread(num_threads=1)
    assert compute.submit(pow, 2, 5).result(timeout=5) == 32
    assert compute.submit(torch.get_num_threads).result(timeout=5) == 1
    failing = compute.submit(torch.zeros(2).reshape, 3)
    with pytest.raises(RuntimeError, match="shape"):
        failing.result(timeout=5)
    assert compute.submit(pow, 2, 2).result(timeout=5) == 4
    assert compute.close()


def test_close_cancels_what_waits_and_does_not_wait_for_ever():
    compute = ComputeThread()
    running, release = threading.Event(), threading.Event()

    def block() -> str:
        running.set()
        release.wait(10)
        return "done"

    first, second = compute.submit(block), compute.submit(pow, 2, 2)
    assert running.wait(5)
    assert not compute.close(timeout_s=0.05)
    with pytest.raises(CancelledError):
        second.result(timeout=5)
    with pytest.raises(RuntimeError, match="closed"):
        compute.submit(pow, 2, 2)
    release.set()
    assert first.result(timeout=5) == "done"
    assert compute.close(timeout_s=5)
