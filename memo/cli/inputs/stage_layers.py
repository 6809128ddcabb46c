"""Layers of each pipeline stage, for `memo plan` and `memo train`: their flag, and how it is read."""

from __future__ import annotations

import argparse

__all__ = ["add_stage_layers_flag"]


def add_stage_layers_flag(group: argparse._ArgumentGroup, *, default: str) -> None:
    """Adds --stage-layers, whose value is a tuple; empty where it is not given."""
    group.add_argument(
        "--stage-layers",
        type=_layer_counts,
        default=(),
        metavar="N,N,...",
        help=f"with --pp: numbers of layers of the stages, in their order; of an interleaved --schedule of all its runs of "
        f"layers (default: {default})",
    )


def _layer_counts(text: str) -> tuple[int, ...]:
    """Numbers such as 12,13,4,3."""
    counts = text.split(",")
    if not all(count.strip().isdecimal() and 0 < int(count) < 1 << 31 for count in counts):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: give a number of layers for each stage, such as 9,9,8,6")
    return tuple(map(int, counts))
