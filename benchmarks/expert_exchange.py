"""Where a bottleneck of experts pays: seconds that a layer's exchange of rows saves, and that its two projections cost.

    make bench ARMS=expert_exchange
    python -m benchmarks.expert_exchange

Predictions by the cost model that plans are made with, of a layer's forward and backward on one rank; experts of equal
parameters at every width, so that their own products take equally long. No collective is hidden.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.results import write_result
from memo.mip.inputs import Collectives, Hardware, RankGroup, hardware_preset
from memo.units import format_bytes

HIDDEN, TOP_K, TOKENS, BYTES = 4096, 6, 8192, 2
BOTTLENECKS = (2048, 1024, 512)
CLUSTERS = (("h100", 8), ("h100", 64), ("a800", 64), ("a100-40g", 64))
"""Machines, and expert-parallel ranks."""
PASSES = 3
"""A projection's products, forward and backward, in units of the forward's."""


def row(name: str, ranks: int, bottleneck: int) -> dict[str, Any]:
    """Seconds of a layer's exchanges at the hidden size and at the bottleneck, and of the projections."""
    machine = hardware_preset(name)
    plain_s, narrow_s = (exchange_s(machine, ranks, width) for width in (HIDDEN, bottleneck))
    flops = 2 * PASSES * 2 * HIDDEN * bottleneck * TOKENS
    projections_s = flops / (machine.peak_flops * machine.matmul_efficiency)
    away = (ranks - 1) / ranks
    saved = 4 * TOP_K * TOKENS * (HIDDEN - bottleneck) * BYTES * away
    return {
        "machine": name,
        "ranks": ranks,
        "bottleneck": bottleneck,
        "plain_s": plain_s,
        "narrow_s": narrow_s,
        "projections_s": projections_s,
        "pays": narrow_s + projections_s < plain_s,
        "pays_below_bytes_per_s": saved / projections_s,
    }


def exchange_s(machine: Hardware, ranks: int, width: int) -> float:
    """Seconds of the four exchanges of a layer: there and back, forward and backward."""
    group = RankGroup.of(ranks, stride=1, gpus_per_node=machine.gpus_per_node)
    return 4 * Collectives(machine).all_to_all_s(TOP_K * TOKENS * width * BYTES, group)


def main(arguments: Sequence[str]) -> int:
    argparse.ArgumentParser(
        prog="expert_exchange", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(arguments)
    rows = [row(name, ranks, bottleneck) for name, ranks in CLUSTERS for bottleneck in BOTTLENECKS]
    for one in rows:
        print(
            f"  {one['ranks']:3} ranks of {one['machine']:9} {HIDDEN} -> {one['bottleneck']:4}: exchange "
            f"{1e3 * one['plain_s']:.1f} -> {1e3 * one['narrow_s']:.1f} ms, projections "
            f"{1e3 * one['projections_s']:.1f} ms; pays below {format_bytes(one['pays_below_bytes_per_s'])}/s"
        )
    print(f"\nWrote {write_result('expert-exchange', {'tokens': TOKENS, 'top_k': TOP_K, 'rows': rows})}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
