"""Models for a rehearsal, on tensors without bytes: Hugging Face's with PEFT's adapters, and memo's GPT."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from memo.errors import UsageError, one_line
from memo.gpt.model import sharded_stages
from memo.hugging_face import (
    PUBLISHED,
    built_model,
    configuration_from,
    model_class,
    names_configuration,
    published_name,
)
from memo.loss import loss_without_logits
from memo.parallel import World
from memo.parallel.decoders import parallelize
from memo.record import Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from memo.gpt import GPTConfig
    from memo.parallel import Layout


def hugging_face_step(
    model: str | Mapping[str, Any],
    *,
    lora: int = 0,
    without_logits: bool = False,
    layers: int | None = None,
    tp: int = 1,
    cp: int = 1,
) -> Callable[..., Step]:
    """Returns a function that builds the step of a model of transformers, in bfloat16.

    Where several GPUs are rehearsed, `memo.parallelize` divides it: parameters are sharded over the GPUs of each of the `tp`
    parts of a matrix, and `tp` times `cp` GPUs share sequences.

    Args:
        model: name of a published model or of its repository, path of a configuration or of its folder, or the
            configuration's fields.
        lora: rank of the adapters that PEFT puts on all linear maps, which alone are trained; 0 trains everything.
        without_logits: the loss is computed in chunks (memo.loss_without_logits).
        layers: number of layers instead of the configuration's.
        tp: tensor-parallel GPUs.
        cp: GPUs that divide the tokens of each sequence.

    Returns:
        A callable with the keywords `batch` and `tokens`, which returns a Step whose loss takes these sizes.

    Raises:
        UsageError: there is no such model, or transformers or PEFT is not installed or refuses it.
    """
    name = model if isinstance(model, str) else str(model.get("model_type"))
    fields: str | Mapping[str, Any] = model
    if isinstance(model, str) and not Path(model).exists():
        published = published_name(model)
        if published is not None:
            fields = PUBLISHED[published].config
        elif not names_configuration(model):
            raise UsageError.unknown("model", model, PUBLISHED, otherwise=", or give the path of a config.json")
    if lora < 0:
        raise UsageError(f"rank {lora} of adapters is less than 1")
    if layers is not None and layers < 1:
        raise UsageError(f"{layers} layers are less than 1")

    def build(*, batch: int, tokens: int) -> Step:
        config = configuration_from(fields, name=name)
        if layers is not None:
            _set_layers(config.get_text_config(), layers)
        made: Any = built_model(model_class(config, name=name), config, name=name, dtype=torch.bfloat16)
        if lora:
            made = _adapted(made, lora, name=name)
        if dist.is_initialized():
            made = parallelize(made, tp=tp, cp=cp, dp=dist.get_world_size() // (tp * cp))
        made.to_empty(device="cpu")
        made.tie_weights()
        made.train()
        if without_logits:
            loss_without_logits(made)

        def loss(tokens: int = tokens) -> torch.Tensor:
            ids = torch.zeros(batch, tokens, dtype=torch.int64)
            return made(input_ids=ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]

        return Step(model=made, loss=loss)

    return build


def gpt_step_of_rank(config: GPTConfig, layout: Layout) -> Callable[..., Step]:
    """Returns a function that builds the first rank's step of memo's GPT in bfloat16, as `memo train` divides it.

    Args:
        config: the whole model.
        layout: without pipeline parallelism.

    Returns:
        A callable with the keywords `batch`, sequences in a microbatch of each of the layout's `dp` replicas, and `tokens`
        of a whole sequence, which returns a Step.
    """

    def build(*, batch: int, tokens: int) -> Step:
        world = World.of(layout, "cpu")
        (stage,) = sharded_stages(config, world, seq=tokens, dtype=torch.bfloat16)
        stage.to_empty(device="cpu")
        ids = torch.zeros(batch, len(stage.own), dtype=torch.int64)

        def loss() -> torch.Tensor:
            return stage(ids, ids)  # type: ignore[no-any-return]

        group = world.layer_ranks.get_group()
        return Step(model=stage, loss=loss, inputs=(ids,), layers=list(stage.layers.values()), group=group)

    return build


def _set_layers(text: Any, layers: int) -> None:
    """Changes the number of layers; their kinds go on as they began."""
    text.num_hidden_layers = layers
    kinds = getattr(text, "layer_types", None)
    if kinds:
        text.layer_types = [kinds[index % len(kinds)] for index in range(layers)]


def _adapted(model: Any, rank: int, *, name: str) -> Any:
    """The model with PEFT's adapters on all linear maps."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise UsageError(f'{name}: adapters need PEFT: pip install "peft>=0.17"') from None
    try:
        config = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
        return get_peft_model(model, config)
    except Exception as error:
        raise UsageError(f"{name}: PEFT cannot adapt it: {one_line(error)}") from None
