"""The model that `memo plan` plans: a preset, a published model, or a configuration of Hugging Face's transformers.

Owns the flags that name and shape it. torch and transformers are imported only for a model that is no preset of memo's GPT.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from memo.cli.inputs.fields import add_fields
from memo.cli.inputs.flag_types import Flag
from memo.cli.inputs.model_shape import SHAPE_FIELDS, add_shape_flags, gpt_size, named_shape, require_model, shape_flag
from memo.errors import UsageError
from memo.gpt import GPU_PRECISION, PRESETS, GPTConfig, Precision
from memo.gpt.arithmetic import AdapterDtype
from memo.hugging_face import PUBLISHED, published_name

if TYPE_CHECKING:
    from memo.hugging_face import HuggingFaceModel

_FIELDS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab_size": "vocab_size",
}
"""Names of a shape's fields in a configuration of transformers."""
_NAMES = (*PRESETS, *PUBLISHED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model and its loss. The fields are flags."""

    model: Annotated[str | None, Flag(metavar="NAME|PATH", names=_NAMES)] = None
    """Model by name: {names}; or a config.json of Hugging Face's transformers, or a folder with one."""
    precision: Precision | None = None
    """Number format of a named model (default: of memo's GPT bf16-autocast, as memo train has it on a GPU; of a model of
    transformers bf16)."""
    loss_without_logits: bool = False
    """Compute the loss with memo.loss_without_logits, so that the float32 logits are never in memory as a whole (memo's
    GPT never has them)."""


def add_model_flags(group: argparse._ArgumentGroup) -> None:
    """Adds --model and what shapes a model."""
    add_fields(group, ModelOptions)
    add_shape_flags(group)


def planned_precision(args: argparse.Namespace) -> Precision:
    """The precision of the flag, or the one in which the model is trained by default."""
    is_gpt = args.model is not None and gpt_size(args.model) is not None
    return args.precision or (GPU_PRECISION if is_gpt else Precision.BF16)


def planned_model(
    args: argparse.Namespace, *, say: Callable[[str], None] = lambda _: None
) -> GPTConfig | HuggingFaceModel:
    """The model that the flags name; `say` is told which of its kinds of layers are recorded.

    Raises:
        UsageError: no model has this name, there is no such file, transformers cannot build it, or a flag does not apply.
    """
    name: str = args.model
    known = gpt_size(name)
    if known is not None:
        return named_shape(args, known)
    shape = {name: value for name in SHAPE_FIELDS if (value := getattr(args, name)) is not None}
    other = next((shape_flag(name) for name in shape if name not in _FIELDS), "--variant" if args.variant else None)
    if other is not None:
        raise UsageError(f"{other} applies to sizes of memo's GPT only; leave it out")
    return _of_transformers(name, args, shape, say)


def _of_transformers(
    name: str, args: argparse.Namespace, shape: Mapping[str, int], say: Callable[[str], None]
) -> HuggingFaceModel:
    require_model(name, _NAMES)
    published = None if Path(name).exists() else published_name(name)
    from memo.hugging_face import HuggingFaceModel, configuration_from

    config = configuration_from(name if published is None else PUBLISHED[published].config, name=name)
    _reshape(config.get_text_config(), shape, name)
    return HuggingFaceModel(
        config,
        name=name,
        precision=planned_precision(args),
        without_logits=bool(args.loss_without_logits),
        lora=args.lora or 0,
        lora_dtype=args.lora_dtype or AdapterDtype.FP32,
        say=say,
    )


def _reshape(config: Any, shape: Mapping[str, int], name: str) -> None:
    for field, size in shape.items():
        if size < 1:
            raise UsageError(f"{shape_flag(field)} {size} is less than 1")
        if not isinstance(getattr(config, _FIELDS[field], None), int):
            raise UsageError(
                f"{shape_flag(field)}: the configuration of {name} has no {_FIELDS[field]}; change the file"
            )
        setattr(config, _FIELDS[field], size)
    types = getattr(config, "layer_types", None)
    if "layers" in shape and types:
        config.layer_types = [types[index % len(types)] for index in range(shape["layers"])]
