"""Order in which two halves of a layer run, so that collectives of one run beside the computation of the other.

Sub-pipelined tensor parallelism (Lai et al. 2022, Merak, arXiv 2206.04959). A half is a sequence of steps; the order says
whose step is next. Backward takes the same order from its end. Needs no torch.

    step           waits for    computes                    launches
    0 enters                    norm                        gather
    1 attends      gather       projections, attention
    2 leaves                    output projection           sum over the ranks
    3 enters MLP   sum          residual, norm              gather
    4 widens       gather       projections, activation
    5 narrows                   last projection             sum over the ranks
    6 ends         sum          residual

Between a launch and the wait for it the other half has a step with matrix products, but for a layer's first gather and its
last sum.
"""

from __future__ import annotations

WHOLE_LAYER = "abaababababbab"
"""Halves `a` and `b` of the sequences: steps a0 b0 a1 a2 b1 a3 b2 a4 b3 a5 b4 b5 a6 b6."""
MLP_ALONE = "abaabbab"
"""Halves of one sequence's tokens, in the MLP alone, steps 3 to 6: attention needs all tokens."""
