"""The model that `memo rehearse` runs: a published one, a configuration of transformers, a GPT preset, or the user's own."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from memo.cli.inputs.fields import refuse_given
from memo.cli.inputs.flag_types import Count, Flag, Tokens
from memo.cli.inputs.model_shape import gpt_size, require_model
from memo.errors import UsageError
from memo.gpt import PRESETS, preset
from memo.hugging_face import PUBLISHED, published_name
from memo.parallel import Layout, PipelineSchedule, parse_layer_counts
from memo.units import parse_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from memo.record import Step

_NAMES = (*PUBLISHED, *PRESETS)


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(map(parse_tokens, text.split(",")))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RehearsedModel:
    """The model and its microbatches. The fields are flags."""

    model: Annotated[str, Flag(required=True, metavar="NAME|PATH", names=_NAMES)]
    """Published model or GPT preset: {names}; config.json of Hugging Face's transformers or a folder with one; or a model of
    your own as module:function."""
    lora: Annotated[Count | None, Flag(metavar="RANK")] = None
    """Train adapters of PEFT on all linear maps alone."""
    layers: Count | None = None
    """Number of layers (default: the model's)."""
    loss_without_logits: bool = False
    """Compute the loss with memo.loss_without_logits, so that the float32 logits are never in memory as a whole (memo's
    GPT never has them)."""
    seq: Annotated[Tokens, Flag(one_of="length")] = 1024
    """Sequence length in tokens, such as 32k (default 1k)."""
    lengths: Annotated[Sequence[int], Flag(type=_lengths, metavar="TOKENS,...", one_of="length")] = ()
    """Sequence lengths of the steps, one after another, again and again, such as 8k,32k,12k (default: --seq)."""
    batch: Count = 1
    """Sequences in a microbatch of a GPU; with --tp and --cp of the GPUs that share them."""
    accumulate: Count = 1
    """Microbatches in a step."""
    gpus: Count = 1
    """GPUs, of which one is rehearsed, with --pp one of each stage: FSDP2 shards the parameters over them (over those with
    the same ones, with --tp and --pp)."""
    tp: Count | None = None
    """Tensor parallelism."""
    cp: Count | None = None
    """Context parallelism."""
    pp: Count | None = None
    """Pipeline parallelism."""
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    """With --pp: pipeline schedule of the microbatches."""
    chunks: Count | None = None
    """With an interleaved --schedule and a GPT preset: runs of consecutive layers of each pipeline rank (default 2)."""
    stage_layers: Annotated[Sequence[int], Flag(type=parse_layer_counts, metavar="N,N,...")] = ()
    """With --pp: numbers of layers of the stages, in their order, as of memo train (default: equal ones, or for models of
    transformers balanced ones)."""
    tp_overlap: bool = False
    """With --tp and a GPT preset: run layers in two halves, collectives of one beside the other's compute."""
    mlp_tiles: Count | None = None
    """With a GPT preset: compute each MLP in as many tiles, as memo plan says (default 1)."""

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) or 1 for name in ("tp", "cp", "pp")}
        if self.gpus % math.prod(sizes.values()):
            shown = " times ".join(f"--{name} {size}" for name, size in sizes.items() if name != "pp" or size > 1)
            raise UsageError(f"--gpus {self.gpus} is no multiple of {shown}")
        if sizes["pp"] == 1:
            refuse_given(self, "--chunks --stage-layers", "has no meaning without --pp; leave it out")
        _ = self.layout  # raises

    @property
    def layout(self) -> Layout:
        """The GPUs.

        Raises:
            UsageError: as Layout.
        """
        tp, cp, pp = self.tp or 1, self.cp or 1, self.pp or 1
        return Layout(
            dp=self.gpus // (tp * cp * pp),
            tp=tp,
            cp=cp,
            pp=pp,
            schedule=self.schedule,
            chunks=self.chunks,
            stage_layers=tuple(self.stage_layers),
            tp_overlap=self.tp_overlap,
        )

    def builder(self) -> Callable[[], Step]:
        """A callable that builds the step of the longest sequence.

        Raises:
            UsageError: no model has this name, or a flag does not apply to it.
        """
        tokens = max(self.lengths, default=self.seq)
        return functools.partial(_builder(self, tokens), batch=self.batch, tokens=tokens)


def _builder(options: RehearsedModel, tokens: int) -> Callable[..., Step]:
    name = options.model
    if gpt_size(name) is None:
        refuse_given(
            options,
            "--tp-overlap --mlp-tiles --chunks",
            "is for memo's GPT, such as llama3-8b; leave it out for other models",
        )
    if ":" in name and not Path(name).exists():
        why = "applies to models by name or configuration; leave it out"
        refuse_given(options, "--lora --layers --tp --cp --pp --loss-without-logits --lengths", why)
        from memo.record import load_step

        return load_step(name, needs_loss=True)
    if gpt_size(name) is not None:
        return _preset(name, options, tokens)
    require_model(name, _NAMES, also=", or module:function")
    from memo.rehearsal import hugging_face_step

    return hugging_face_step(
        name,
        lora=options.lora or 0,
        without_logits=options.loss_without_logits,
        layers=options.layers,
        tp=options.tp or 1,
        cp=options.cp or 1,
        pp=options.pp or 1,
        schedule=options.schedule,
        microbatches=options.accumulate,
        stage_layers=options.stage_layers,
    )


def _preset(name: str, options: RehearsedModel, tokens: int) -> Callable[..., Step]:
    published = published_name(name) or "a published model"
    refuse_given(options, "--lora", f"does not go with {name}, memo's GPT, which PEFT does not adapt; name {published}")
    config = preset(name, layers=options.layers, mlp_tiles=options.mlp_tiles)
    if config.positions == "learned" and tokens > config.max_seq:
        config = dataclasses.replace(config, max_seq=tokens)
    if options.gpus > 1:
        refuse_given(options, "--lengths", "applies to one GPU; give --seq")
        from memo.rehearsal import gpt_step_of_rank

        layout = options.layout
        layout.check(config, seq=tokens, batch=options.batch * layout.dp, microbatches=options.accumulate)
        return gpt_step_of_rank(config, layout, microbatches=options.accumulate)
    from memo.record import gpt_step

    return functools.partial(gpt_step, config)
