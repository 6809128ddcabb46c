"""The model that `memo rehearse` runs: a published one, a configuration of transformers, a GPT preset, or the user's own.

A name that is exactly a GPT preset's, such as `llama3-8b`, is that preset; any other spelling is the published model.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from memo.errors import UsageError
from memo.gpt import PRESETS, preset, preset_name
from memo.hugging_face import PUBLISHED, names_configuration, published_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from memo.record import Step


def add_rehearsed_model(group: argparse._ArgumentGroup) -> None:
    """Adds --model and what shapes it."""
    group.add_argument(
        "--model",
        required=True,
        metavar="NAME|PATH",
        help=f"published model ({', '.join(PUBLISHED)}), config.json of Hugging Face's transformers or a folder with one, "
        f"GPT preset ({', '.join(PRESETS)}), or a model of your own as module:function",
    )
    group.add_argument("--lora", type=int, metavar="RANK", help="train adapters of PEFT on all linear maps alone")
    group.add_argument("--layers", type=int, metavar="N", help="number of layers (default: the model's)")
    group.add_argument(
        "--loss-without-logits",
        action="store_true",
        help="loss of memo.loss_without_logits instead of the model's own",
    )


def rehearsed_step(args: argparse.Namespace, tokens: int) -> Callable[[], Step]:
    """A callable that builds the step that the flags name.

    Args:
        args: the parsed flags.
        tokens: most tokens of a sequence.

    Raises:
        UsageError: no model has this name, or a flag does not apply to it.
    """
    name: str = args.model
    if args.lora is not None and args.lora < 1:
        raise UsageError(f"--lora {args.lora} is less than 1")
    if args.layers is not None and args.layers < 1:
        raise UsageError(f"--layers {args.layers} is less than 1")
    if ":" in name and not Path(name).exists():
        return _users(name, args, tokens)
    if _is_preset(name):
        return _preset(name, args, tokens)
    if not Path(name).exists() and published_name(name) is None:
        if not names_configuration(name):
            raise UsageError(
                f"unknown model {name!r}; choose one of {', '.join((*PUBLISHED, *PRESETS))}, or give the path of a "
                "config.json, or module:function"
            )
        raise UsageError(
            f"{name}: no such file or folder; nothing is fetched: download its config.json and give the path"
        )
    from memo.rehearsal import hugging_face_step

    build = hugging_face_step(name, lora=args.lora or 0, without_logits=args.loss_without_logits, layers=args.layers)
    return functools.partial(build, batch=args.batch, tokens=tokens)


def _is_preset(name: str) -> bool:
    if Path(name).exists():
        return False
    return name.lower() in PRESETS or (published_name(name) is None and preset_name(name) is not None)


def _users(name: str, args: argparse.Namespace, tokens: int) -> Callable[[], Step]:
    for flag in ("lora", "layers", "loss_without_logits"):
        if getattr(args, flag):
            raise UsageError(f"--{flag.replace('_', '-')} applies to models by name or configuration; leave it out")
    if args.lengths:
        raise UsageError(f"--lengths: the step of {name} takes no tokens; leave --lengths out")
    from memo.record import load_step

    return functools.partial(load_step(name, needs_loss=True), batch=args.batch, tokens=tokens)


def _preset(name: str, args: argparse.Namespace, tokens: int) -> Callable[[], Step]:
    if args.lora:
        raise UsageError(f"--lora: {name} is memo's GPT, which PEFT does not adapt; name a published model")
    if args.loss_without_logits:
        raise UsageError(f"--loss-without-logits: {name} is memo's GPT, whose loss has no logits in memory")
    config = preset(name, layers=args.layers)
    if config.positions == "learned" and tokens > config.max_seq:
        config = preset(name, layers=args.layers, max_seq=tokens)
    from memo.record import gpt_step

    return functools.partial(gpt_step, config, batch=args.batch, tokens=tokens)
