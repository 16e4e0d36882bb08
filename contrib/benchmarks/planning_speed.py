"""How long planning takes in a process that has never planned: imports, compilation and search together.

`python -m contrib.benchmarks.planning_speed plan 48` plans a model of 1000 operators over 48 peers of a made-up world;
`... capture` captures GPT-2 XL from meta tensors, counts its work, and prints the seconds of that.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

OPERATORS = 1000
MICRO_BATCHES = 32
DEADLINE_S = 600


def measure(peers: tuple[int, ...] = (48, 200, 1000)) -> dict[str, float]:
    """The figures; each in a process of its own with empty caches of compiled code."""
    figures = {}
    for count in peers:
        began = time.perf_counter()
        said = _cold("plan", str(count))
        figures[f"plan_seconds_{count}"] = time.perf_counter() - began
        print(f"  {count} peers: {figures[f'plan_seconds_{count}']:.1f} s, of which search {said}", flush=True)
    figures["capture_seconds_xl"] = float(_cold("capture"))
    print(f"  capture and costs of GPT-2 XL: {figures['capture_seconds_xl']:.1f} s", flush=True)
    return figures


def _cold(*arguments: str) -> str:
    with tempfile.TemporaryDirectory() as empty:
        command = [sys.executable, "-m", "contrib.benchmarks.planning_speed", *arguments]
        environment = os.environ | {"NUMBA_CACHE_DIR": empty}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return done.stdout.strip()


def _plan(num_peers: int) -> str:
    from contrib.benchmarks.operators import random_operators
    from contrib.benchmarks.random_networks import random_network
    from fusion_p2p.plan.layout import Layout
    from fusion_p2p.plan.request import Terms
    from fusion_p2p.plan.schedulers import SCHEDULERS

    began = time.perf_counter()
    terms = Terms(MICRO_BATCHES, recompute=True, codec="adaptive")
    found = SCHEDULERS["auto"](random_operators(OPERATORS), random_network(num_peers), terms)
    if not isinstance(found, Layout):
        raise SystemExit(found.reason)
    return f"{time.perf_counter() - began:.1f} s, {len(found.stages)} stages on {len(found.peers)} peers"


def _capture() -> str:
    from fusion_p2p.config import PlanConfig
    from fusion_p2p.owner.dry_run import cost_model

    config = PlanConfig(model="gpt2-xl", batch_size=1, micro_batches=1, bootstrap=("unused",))
    return f"{cost_model(config).capture_s:.3f}"


if __name__ == "__main__":
    print(_plan(int(sys.argv[2])) if sys.argv[1] == "plan" else _capture())
