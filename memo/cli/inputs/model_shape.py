"""Sizes of memo's GPT by name, the same in every command, and their shape, the same in `memo train` and `memo plan`.

A size's own name, such as `llama3-8b`, is memo's GPT. Any other spelling of it, such as `llama-3-8b` or the repository's
name, is the published model of transformers, if there is one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from memo.cli.inputs.fields import add_fields, given_fields
from memo.errors import UsageError
from memo.gpt import (
    MOE_FLAGS,
    PRESETS,
    AttentionPattern,
    GPTConfig,
    MoeConfig,
    Variant,
    preset,
    preset_name,
    with_experts,
    with_pattern,
)
from memo.hugging_face import names_configuration, published_name

_SIZES = "layers hidden heads kv_heads ffn"
_PATTERN = "window full_every"
_EXPERTS = "experts top_k shared_experts expert_hidden bottleneck every"
_LOSSES = " balance_coefficient z_coefficient"
SHAPE_FIELDS = f"{_SIZES} vocab_size {_PATTERN} {_EXPERTS}".split()
"""Names of the values that add_shape_flags adds for `memo plan`; None where one is not given."""
_FLAGS = {
    "vocab_size": "--vocab",
    "window": "--sliding-window",
    "embedding": "--embedding-exchange",
    **{name: f"--{MOE_FLAGS[name]}" for name in MOE_FLAGS},
}
_DEFAULT = "the model's"


def gpt_size(name: str) -> str | None:
    """The size of memo's GPT that a name means; None for a published model, and for what is a file or no name."""
    if Path(name).exists():
        return None
    if name.lower() in PRESETS:
        return name.lower()
    return preset_name(name) if published_name(name) is None else None


def require_model(name: str, names: Iterable[str], *, also: str = "") -> None:
    """Refuses what is neither a published model nor a configuration's file or folder; `also`: what else might be given.

    Raises:
        UsageError: says what is known, or that nothing is fetched.
    """
    if Path(name).exists() or published_name(name) is not None:
        return
    if not names_configuration(name):
        raise UsageError.unknown("model", name, names, otherwise=f", or give the path of a config.json{also}")
    raise UsageError(f"{name}: no such file or folder; nothing is fetched: download its config.json and give the path")


def namesake(name: str) -> str | None:
    """One line for the name of a model that is both a size of memo's GPT and a published one: which it is; else None."""
    size, published = preset_name(name), published_name(name)
    if size is None or published is None or Path(name).exists():
        return None
    if gpt_size(name) is not None:
        return f"{name} is memo's GPT; the model of Hugging Face's transformers is {published}"
    return f"{name} is the model of Hugging Face's transformers; memo's GPT of its size is {size}"


def add_shape_flags(group: argparse._ArgumentGroup, *, training: bool = False) -> None:
    """Adds the flags that shape a model.

    Args:
        group: parser or group.
        training: with what changes no plan, the dropout and the factors of routers' losses; without the vocabulary, which
            is the data's.
    """
    group.add_argument(
        "--variant",
        choices=get_args(Variant),
        help="architecture of the layers of a size alone, such as 7b (default: the model's, gpt where it has both)",
    )
    sizes = f"{_SIZES} {'dropout' if training else 'vocab_size'}"
    add_fields(group, GPTConfig, sizes, flags=_FLAGS, default=_DEFAULT)
    add_fields(group, AttentionPattern, _PATTERN, flags=_FLAGS, default=_DEFAULT)
    add_fields(group, MoeConfig, _EXPERTS + _LOSSES * training, flags=_FLAGS, default=_DEFAULT)


def shape_flag(name: str) -> str:
    """The flag of a field."""
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def named_shape(args: argparse.Namespace, name: str) -> GPTConfig:
    """The shape of a size with what the flags change.

    Raises:
        UsageError: no size has this name, or numbers do not fit together.
    """
    shape = preset(name, variant=args.variant, **given_fields(args, f"{_SIZES} vocab_size dropout"))
    shape = with_experts(shape, **given_fields(args, f"{_EXPERTS}{_LOSSES}"))
    return with_pattern(shape, sliding_window=args.window, full_every=args.full_every)
