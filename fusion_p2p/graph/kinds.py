"""The kinds of work that a peer's rates are measured for. Known to planners, so without torch."""

from __future__ import annotations

MATMUL = "matmul"
CONVOLUTION = "convolution"
ATTENTION = "attention"
MEMORY = "memory"
KINDS = (MATMUL, CONVOLUTION, ATTENTION, MEMORY)
