"""Models for a rehearsal, on tensors without bytes: Hugging Face's with PEFT's adapters, and memo's GPT."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from memo.errors import UsageError, one_line
from memo.gpt.model import sharded_stages
from memo.gpt.train import TiedEmbedding
from memo.hugging_face import (
    PUBLISHED,
    built_model,
    configuration_from,
    model_class,
    names_configuration,
    published_name,
)
from memo.loss import loss_without_logits
from memo.parallel import PipelineSchedule, World, make_schedule
from memo.parallel.decoders import DecoderPipeline, parallelize
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
    pp: int = 1,
    schedule: str = PipelineSchedule.ONE_F_ONE_B,
    microbatches: int = 1,
    stage_layers: Sequence[int] = (),
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
        pp: GPUs that divide the layers.
        schedule: with `pp`, as of `memo.parallelize`.
        microbatches: with `pp`, of a step.
        stage_layers: with `pp`, layers of each stage; empty: balanced by `memo.parallelize`.

    Returns:
        A callable with the keywords `batch` and `tokens`, which returns a Step whose loss takes these sizes; with `pp` the
        caller's rank's, whose loss runs the schedule and takes none.

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
            staged: dict[str, Any] = {"microbatches": microbatches, "stage_layers": stage_layers, "tokens": tokens}
            dp = dist.get_world_size() // (tp * cp * pp)
            made = parallelize(made, tp=tp, cp=cp, pp=pp, dp=dp, schedule=schedule, **(staged if pp > 1 else {}))
        made.to_empty(device="cpu")
        made.train()
        last: Any = made.stages[-1] if isinstance(made, DecoderPipeline) else None
        if last is None:
            made.tie_weights()
        if without_logits and (last is None or last.is_last):
            loss_without_logits(made if last is None else last.model)
        if last is not None:
            ids = torch.zeros(batch * microbatches, tokens, dtype=torch.int64)
            step = functools.partial(made.step, input_ids=ids, labels=ids)
            order = made.schedule(*ids.shape)
            return Step(model=made, loss=step, inputs=(ids,), layers=made.layers, schedule=order)

        def loss(tokens: int = tokens) -> torch.Tensor:
            ids = torch.zeros(batch, tokens, dtype=torch.int64)
            return made(input_ids=ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]

        return Step(model=made, loss=loss)

    return build


def gpt_step_of_rank(config: GPTConfig, layout: Layout, *, microbatches: int = 1) -> Callable[..., Step]:
    """Returns a function that builds a rank's step of memo's GPT in bfloat16, as `memo train` divides it.

    Args:
        config: the whole model.
        layout: of the ranks.
        microbatches: of a step, with pipeline parallelism.

    Returns:
        A callable with the keywords `batch`, sequences in a microbatch of each of the layout's `dp` replicas, and `tokens`
        of a whole sequence, which returns a Step.
    """

    def build(*, batch: int, tokens: int) -> Step:
        world = World.of(layout, "cpu")
        stages = sharded_stages(config, world, seq=tokens, dtype=torch.bfloat16)
        model = stages[0] if len(stages) == 1 else torch.nn.ModuleList(stages)
        model.to_empty(device="cpu")
        tokens = len(stages[0].own)
        ids = torch.zeros(batch * microbatches, tokens, dtype=torch.int64)
        layers = [layer for stage in stages for layer in stage.layers.values()]
        group = world.layer_ranks.get_group()
        if layout.pp == 1:
            return Step(model=model, loss=lambda: stages[0](ids, ids), inputs=(ids,), layers=layers, group=group)
        schedule = make_schedule(
            layout,
            dict(zip(layout.stages_of(world.pp), stages, strict=True)),
            world.group("pp"),
            tokens=torch.empty(batch, tokens, dtype=torch.int64, device="meta"),
            hidden=torch.empty(batch, tokens, config.hidden, dtype=torch.bfloat16, device="meta", requires_grad=True),
            microbatches=microbatches,
            device=torch.device("cpu"),
        )
        first = (ids,) if stages[0].is_first else ()
        last = {"target": ids, "losses": [], "targets": ids} if any(stage.is_last for stage in stages) else {}

        tied = TiedEmbedding(stages, world)

        def loss() -> None:
            schedule.step(*first, **last, return_outputs=False)
            tied.add_gradients()

        return Step(model=model, loss=loss, inputs=(ids,), layers=layers, group=group, schedule=schedule)

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
