"""Flags of a pattern of full and local attention, of `memo train`, `memo plan` and `memo dry-run`."""

from __future__ import annotations

import argparse

from memo.errors import UsageError
from memo.units import parse_tokens

__all__ = ["PATTERN_FLAGS", "add_pattern_flags", "pattern_numbers"]

PATTERN_FLAGS = ("sliding-window", "full-every")
"""Flags without the dashes that give a model local attention, or shape it."""


def add_pattern_flags(group: argparse._ArgumentGroup) -> None:
    """Adds the flags."""
    group.add_argument(
        "--sliding-window",
        type=_window,
        metavar="TOKENS",
        help="tokens that each token of a layer with local attention attends to, such as 1k (default: the model's, all)",
    )
    group.add_argument(
        "--full-every",
        type=int,
        metavar="N",
        help="with --sliding-window: every N-th layer has full attention; 0: none has (default: the model's, else 2)",
    )


def pattern_numbers(args: argparse.Namespace) -> dict[str, int | None]:
    """Numbers of the flags by their names, as `memo.gpt.with_pattern` takes them; None where one is not given."""
    return {"sliding_window": args.sliding_window, "full_every": args.full_every}


def _window(text: str) -> int:
    try:
        return parse_tokens(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
