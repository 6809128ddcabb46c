"""Training step that a command measures: its options, and the builder of its `Step`.

Shared by `memo profile` and `memo record`. A step is one of the GPT presets, or the user's own `module:function`. torch is
imported only when a builder is made.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from memo.errors import UsageError
from memo.gpt import PRESETS, GPTConfig, Precision, preset

if TYPE_CHECKING:
    from memo.record import Step

OWN_MODEL = """\
A model of your own is given as module:function; the module must be importable from the current directory. The function is
called with the keywords batch and tokens and returns (model, step): a module on the CPU, and any callable without arguments
that runs one forward pass and returns the loss.
"""
"""Explanation of `--model module:function` for the end of a help text."""


def add_step_options(parser: argparse.ArgumentParser, *, precisions: Sequence[str], default: str) -> None:
    """Adds the options from `--model` to `--precision`.

    Args:
        parser: the subcommand's parser.
        precisions: the choices of `--precision`.
        default: the default of `--precision`.
    """
    parser.add_argument(
        "--model",
        default="tiny",
        metavar="NAME",
        help=f"GPT preset ({', '.join(PRESETS)}), or a model of your own as module:function (default tiny)",
    )
    parser.add_argument(
        "--variant",
        choices=("gpt", "llama"),
        help="architecture of the preset's layers (default: its own, gpt where it has both)",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="number of layers (default: the preset's)")
    parser.add_argument(
        "--seq", default="1k", metavar="TOKENS", help="sequence length in tokens, such as 32k or 1m (default 1k)"
    )
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences in the batch (default 1)")
    parser.add_argument(
        "--precision", choices=precisions, default=default, help=f"number format of a preset (default {default})"
    )


def is_preset(args: argparse.Namespace) -> bool:
    """True for a GPT preset, False for the user's `module:function`."""
    return ":" not in args.model


def preset_config(args: argparse.Namespace, tokens: int) -> GPTConfig:
    """The preset's shape, with a position table of at least `tokens` rows.

    Raises:
        UsageError: no preset has this name, or its numbers do not fit together.
    """
    shape = {"variant": args.variant, "layers": args.layers}
    config = preset(args.model, **shape)
    if config.positions == "learned" and tokens > config.max_seq:
        config = preset(args.model, max_seq=tokens, **shape)
    return config


def step_builder(args: argparse.Namespace, tokens: int, *, needs_loss: bool = True) -> Callable[[], Step]:
    """A callable that builds the step on one rank.

    Args:
        args: the options that `add_step_options` added.
        tokens: tokens of a sequence.
        needs_loss: False takes steps of the user's that run backward themselves, too.

    Raises:
        UsageError: the preset or the function does not exist, or an option does not apply to the user's model.
    """
    if not is_preset(args):
        if args.layers is not None or args.variant is not None:
            raise UsageError("--layers and --variant apply to named models only; leave them out")
        from memo.record import load_step

        return functools.partial(load_step(args.model, needs_loss=needs_loss), batch=args.batch, tokens=tokens)
    config = preset_config(args, tokens)
    from memo.record import gpt_step

    return functools.partial(gpt_step, config, batch=args.batch, tokens=tokens, precision=Precision(args.precision))
