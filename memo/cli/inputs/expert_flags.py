"""Flags of a mixture of experts, of `memo train`, `memo plan` and `memo dry-run`."""

from __future__ import annotations

import argparse

__all__ = ["EXPERT_FLAGS", "add_expert_flags", "expert_numbers"]

_SHAPE = {
    "experts": "experts of a layer that has them (default: the model's, none)",
    "top-k": "with --experts: experts of each token (default: the model's, else 2)",
    "shared-experts": "with --experts: experts that all tokens use besides (default: the model's, else 0)",
    "expert-hidden": "with --experts: inner width of an expert (default: the model's, else the MLP's)",
    "expert-bottleneck": "with --experts: numbers of a token that experts get and --ep exchanges, with a projection before "
    "and one behind; 0: the hidden size (default: the model's, else 0)",
    "every": "with --experts: every N-th layer has them (default: the model's, else 1)",
}
EXPERT_FLAGS = tuple(_SHAPE)
"""Flags without the dashes that give a model experts, or shape them."""
_LOSSES = {
    "balance-loss": "with --experts: factor of the load-balancing loss (default: the model's, else 0.01)",
    "z-loss": "with --experts: factor of the router z-loss (default: the model's, else 0.001)",
}


def add_expert_flags(group: argparse._ArgumentGroup, *, losses: bool = False) -> None:
    """Adds the flags; `losses`: with those of the routers' losses."""
    for name, words in _SHAPE.items():
        group.add_argument(f"--{name}", type=int, metavar="N", help=words)
    for name, words in _LOSSES.items() if losses else ():
        group.add_argument(f"--{name}", type=float, metavar="F", help=words)


def expert_numbers(args: argparse.Namespace) -> dict[str, int | None]:
    """Numbers of the flags by their names, as `memo.gpt.with_experts` takes them; None where one is not given."""
    return {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name in EXPERT_FLAGS}
