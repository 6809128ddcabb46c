"""Request of `memo plan` from its command line: files read, sizes converted to bytes and tokens."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from memo.cli.inputs.batch_sizes import batch_sizes
from memo.cli.inputs.budgets import budgets_of
from memo.cli.inputs.fields import given_fields, refuse_given
from memo.cli.inputs.flag_types import Flag, at_least
from memo.cli.inputs.machine import machine_of
from memo.cli.inputs.model_shape import SHAPE_FIELDS, gpt_size, shape_flag
from memo.cli.inputs.planned_model import planned_model, planned_precision
from memo.cli.terminal.file_kinds import FileKind, require_kind
from memo.errors import UsageError
from memo.gpt import EmbeddingGradients, GPTConfig, Precision
from memo.gpt.arithmetic import StepLayout
from memo.mip.activation import MLP_TILE_COUNTS, read_profile
from memo.mip.inputs import Hardware, PipelineSchedule
from memo.parallel import ContextAttention
from memo.search import Request

if TYPE_CHECKING:
    from memo.hugging_face import HuggingFaceModel
    from memo.mip.inputs import Profile, Signature

AUTO = "auto"
TILE_TOKENS = 1024
"""Tokens of each context-parallel rank by which lengths differ."""
TRAINING_FIELDS = "recompute zero optimizer lora lora_dtype base embedding codec optimizer_offload"
"""Names of the fields of TrainingMethod that are flags; None where one is not given."""
_METHOD_WORDS = {"none": " without recompute", "selective": " selective recompute", "full": " full recompute"}


def _count_or_auto(text: str) -> int | str:
    return AUTO if text.lower() == AUTO else at_least(1)(text)


CountOrAuto = Annotated[int | str, Flag(type=_count_or_auto, metavar="N")]


def unheard(words: str) -> None:
    """Takes what is said where nobody listens; unlike a lambda it goes to other processes with a model."""


def parse_request(
    args: argparse.Namespace,
    *,
    model: GPTConfig | HuggingFaceModel | None = None,
    machine: Hardware | None = None,
    say: Callable[[str], None] = unheard,
) -> Request:
    """Parses the arguments and reads the files.

    Args:
        args: the parsed flags; with --max-seq the request is of one tile of tokens.
        model: the model, where it has been built.
        machine: of a cluster's file, instead of --gpu.
        say: is told which kinds of layers are recorded, now and for other layouts.

    Raises:
        UsageError: an argument is invalid or contradicts another.
        PlanError: a file cannot be read.
    """
    if machine is None and args.gpu is None:
        raise UsageError("give the machine: --gpu, or --cluster with a file of groups of nodes")
    machine = machine_of(args, machine, args.net)
    if args.profile is not None:
        require_kind(args.profile, FileKind.PROFILE)
    if (args.profile is None) == (args.model is None):
        raise UsageError("give either --model and --seq, or --profile")
    if args.profile is not None:
        _require_named_model(args)
    profile = None if args.profile is None else read_profile(args.profile)
    if args.model is not None and args.seq is None and not args.max_seq:
        raise UsageError("--model needs --seq, such as 128k, or --max-seq")
    if args.embedding is EmbeddingGradients.SPARSE and args.model is not None and gpt_size(args.model) is None:
        raise UsageError(
            f"--embedding-exchange sparse applies to sizes of memo's GPT only; {args.model} exchanges its own gradients"
        )
    if not args.lora:
        refuse_given(args, "--lora-dtype", "applies to adapters; give --lora RANK, too")
    config = None if args.model is None else planned_model(args, say=say) if model is None else model
    training = given_fields(args, TRAINING_FIELDS)
    if isinstance(config, GPTConfig) and config.moe is not None and training.get("zero", 3) != 3:
        raise UsageError(f"a mixture of experts is sharded as memo train does; leave out --zero {args.zero}")
    layout, accumulate = _layout(args, profile)
    _require_attention(args, layout, config)
    if args.tp_overlap:
        _require_overlap(args, layout, config)
    return Request(
        config=config,
        model=(args.model or "") + ("" if args.recompute is None else _METHOD_WORDS[args.recompute]),
        precision=planned_precision(args),
        tiles=_tiles(args, profile, config),
        layout=layout,
        profile=profile,
        machine=machine,
        budgets=budgets_of(args, machine),
        shares_host=args.host is None,
        accumulate=accumulate,
        schedule=_schedule(args, layout, accumulate),
        chunks=args.chunks,
        stage_layers=_stage_layers(args, layout),
        **{**training, "codec": _codec(args, profile, config)},
    )


def _codec(
    args: argparse.Namespace, profile: Profile | None, config: GPTConfig | HuggingFaceModel | None
) -> str | None:
    """The codec of the flag; a measured profile has its own."""
    asked: str | None = args.codec
    if profile is not None:
        if asked not in (None, profile.codec):
            measured = "without a codec" if profile.codec is None else f"with --codec {profile.codec}"
            raise UsageError(f"--codec {asked}: the profile is of steps {measured}; give --model instead")
        return profile.codec
    if asked is not None and not isinstance(config, GPTConfig):
        raise UsageError(f"--codec {asked} applies to sizes of memo's GPT only; {args.model} is planned without it")
    return asked


def _require_attention(
    args: argparse.Namespace, layout: StepLayout, config: GPTConfig | HuggingFaceModel | None
) -> None:
    """Checks --cp-attention; a layout has `ring` where that is asked for."""
    asked = args.cp_attention or ContextAttention.AUTO
    if asked is ContextAttention.AUTO:
        return
    if not isinstance(config, GPTConfig):
        raise UsageError(
            f"--cp-attention {asked} applies to sizes of memo's GPT only; others exchange heads for tokens"
        )
    if layout.cp == 1 and not args.search:
        raise UsageError(f"--cp-attention {asked} has no meaning without --cp")
    if asked is ContextAttention.ULYSSES and layout.rings(config.heads):
        raise UsageError(
            f"--tp {layout.tp} times --cp {layout.cp} does not divide {config.heads} heads; use --cp-attention ring"
        )
    if asked is ContextAttention.RING and config.is_local_within(layout.tokens):
        raise UsageError("local attention is not possible with --cp-attention ring; use ulysses")
    if asked is ContextAttention.RING and planned_precision(args) is Precision.FP32:
        raise UsageError("ring attention needs half precision on a GPU; give --precision bf16 or bf16-autocast")


def _require_overlap(args: argparse.Namespace, layout: StepLayout, config: GPTConfig | HuggingFaceModel | None) -> None:
    """Checks --tp-overlap; a profile by arithmetic refuses what cannot be halved."""
    if args.profile is not None and not layout.tp_overlap:
        raise UsageError("--tp-overlap: the profile is of steps without it; leave it out, or give --model instead")
    if args.profile is None and not isinstance(config, GPTConfig):
        raise UsageError(f"--tp-overlap applies to sizes of memo's GPT only; {args.model} trains without it")
    if layout.tp == 1 and not args.search:
        raise UsageError("--tp-overlap has no meaning without --tp; give --tp 2 or more, or leave it out")
    if isinstance(config, GPTConfig) and config.moe is not None:
        raise UsageError("--tp-overlap: experts are chosen for all rows at once; leave it out with --experts")


def _stage_layers(args: argparse.Namespace, layout: StepLayout) -> tuple[int, ...]:
    """Checks --stage-layers; how many layers there are is known with the profile."""
    counts: tuple[int, ...] = args.stage_layers or ()
    runs = layout.pp * (args.chunks or args.schedule.default_chunks)
    if counts and len(counts) != runs:
        raise UsageError(f"--stage-layers has {len(counts)} numbers, and there are {runs} runs of layers")
    if counts and layout.pp == 1:
        raise UsageError("--stage-layers has no meaning without --pp")
    return counts


def _require_named_model(args: argparse.Namespace) -> None:
    """Refuses flags that describe a named model where a profile is given."""
    names = [*SHAPE_FIELDS, "variant", "loss_without_logits", *TRAINING_FIELDS.split()]
    given = [shape_flag(name) for name in names if name != "codec" and getattr(args, name) is not None]
    if given:
        raise UsageError(f"{given[0]} applies to a named model only; a profile has the step that was measured")


def _schedule(args: argparse.Namespace, layout: StepLayout, accumulate: int) -> PipelineSchedule:
    schedule: PipelineSchedule = args.schedule
    if layout.pp == 1 and schedule is not PipelineSchedule.ONE_F_ONE_B:
        raise UsageError(f"--schedule {schedule} has no meaning without --pp")
    wrong = None if args.chunks is None else schedule.reason_not_chunks(args.chunks)
    if wrong is not None:
        raise UsageError(f"--chunks {args.chunks} {wrong}")
    wrong = schedule.reason_unsupported(accumulate, layout.pp) if schedule.default_chunks > 1 else None
    if wrong is not None:
        raise UsageError(f"--accumulate {accumulate} {wrong}")
    return schedule


def _tiles(
    args: argparse.Namespace, profile: Profile | None, config: GPTConfig | HuggingFaceModel | None
) -> tuple[int, ...]:
    asked = args.mlp_tiles or AUTO
    if profile is None and not isinstance(config, GPTConfig):
        if asked not in (AUTO, 1):
            raise UsageError(
                f"--mlp-tiles {asked} applies to sizes of memo's GPT only; {args.model} computes its own MLPs"
            )
        return (1,)
    if args.recompute is not None:
        if asked not in (AUTO, 1):
            raise UsageError(f"--mlp-tiles {asked} has no meaning with --recompute {args.recompute}")
        return (1,)
    if asked == AUTO and isinstance(config, GPTConfig) and config.moe is not None:
        return (1,)  # experts are not computed in tiles
    if asked == AUTO:
        return MLP_TILE_COUNTS if profile is None else (profile.mlp_tiles,)
    if profile is not None:
        raise UsageError("--mlp-tiles applies to a named model only; a profile has the tiles it was measured with")
    return (int(asked),)


def _layout(args: argparse.Namespace, profile: Profile | None) -> tuple[StepLayout, int]:
    """The layout, and the number of microbatches in a step."""
    overlap = bool(args.tp_overlap) if profile is None else profile.signature.tp_overlap
    batch, sizes = args.batch, {"tp": args.tp, "cp": args.cp, "pp": args.pp, "ep": args.ep}
    if profile is not None:
        known = profile.signature
        _require_agreement(args, known)
        batch, sizes = known.batch, {name: getattr(known, name) for name in sizes}
    if profile is not None:
        tokens = profile.signature.tokens
    else:
        tokens = TILE_TOKENS * args.cp if args.max_seq else args.seq
    ring = args.cp_attention == ContextAttention.RING and sizes["cp"] > 1
    layout = StepLayout(tokens=tokens, gpus=args.gpus, ring=ring, tp_overlap=overlap, **sizes)
    batch, accumulate = batch_sizes(batch, args.accumulate, args.global_batch, replicas=layout.replicas)
    return dataclasses.replace(layout, batch=batch), accumulate


def _require_agreement(args: argparse.Namespace, known: Signature) -> None:
    """Refuses flags that contradict the measured step, which would have no effect."""
    asked = {name: size for name, size in given_fields(args, "tp cp pp ep").items() if size != 1}
    asked |= given_fields(args, "batch seq")
    for name, given in asked.items():
        measured = known.tokens if name == "seq" else getattr(known, name)
        if given != measured:
            raise UsageError(
                f"--{name} {given}: the profile is of {measured}; leave out --{name}, or measure another profile"
            )
