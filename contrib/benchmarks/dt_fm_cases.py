"""`auto` against DT-FM on the world that DT-FM was measured in, both judged by the simulator."""

from __future__ import annotations

from itertools import product

import numpy as np

from contrib.benchmarks.dt_fm import dt_fm
from contrib.benchmarks.operators import MODELS
from contrib.benchmarks.planner_cases import RATIO, RECOMPUTED_FROM, network_of_bed
from fusion_p2p.plan.auto import auto
from fusion_p2p.plan.judging import Judge
from fusion_p2p.plan.layout import Layout
from fusion_p2p.plan.request import Terms

BED = "t5-world-64-gpus-8-cities"
STAGES = (4, 8, 16)
MICRO_BATCHES = (16, 32)
CODECS = ("none", "adatopk")


def measure() -> dict[str, float]:
    """How much faster `auto` is than DT-FM with the best of several numbers of stages, geometric mean and least."""
    ratios = []
    for model, micro_batches, codec in product(MODELS, MICRO_BATCHES, CODECS):
        chain, network = MODELS[model](), network_of_bed(BED)
        terms = Terms(micro_batches, recompute=micro_batches >= RECOMPUTED_FROM, codec=codec, ratio=RATIO)
        theirs = Judge(chain, network, terms)
        for num_stages in STAGES:
            theirs.offer(dt_fm(chain, network, terms, num_stages))
        found = auto(chain, network, terms)
        if not isinstance(found, Layout) or theirs.best is None:
            continue
        ours_s = Judge(chain, network, terms).offer(found)
        ratios.append(theirs.best_s / ours_s)
        shape = f"{len(theirs.best.stages)} x {len(theirs.best.stages[0].peers)}"
        print(f"  {model}, {micro_batches}, {codec}: dt-fm {theirs.best_s:.3g} s ({shape}), auto {ours_s:.3g} s", flush=True)
    return {"auto_over_dtfm_geo": float(np.exp(np.mean(np.log(ratios)))), "auto_over_dtfm_min": min(ratios)}


if __name__ == "__main__":
    print(measure())
