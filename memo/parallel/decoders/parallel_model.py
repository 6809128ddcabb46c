"""`memo.parallelize`: an unmodified decoder of transformers over ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from memo.errors import NoRepeatedLayers, UsageError
from memo.parallel.decoders import context, tensor
from memo.parallel.decoders.calls import ForwardCalls, calls_of
from memo.parallel.decoders.pipeline import DecoderPipeline
from memo.parallel.decoders.stages import DecoderStage, balanced, check_runs, check_stages
from memo.parallel.layout import Layout, PipelineSchedule
from memo.parallel.tensor_parallel_group import note_group
from memo.swap import find_layers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SCHEDULES = [schedule for schedule in PipelineSchedule if not schedule.splits_backward]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    sequence_parallel: bool = True,
    schedule: str = PipelineSchedule.ONE_F_ONE_B,
    microbatches: int | None = None,
    stage_layers: Sequence[int] = (),
    tokens: int | None = None,
) -> nn.Module:
    """Divides a decoder of transformers over ranks.

        model = AutoModelForCausalLM.from_pretrained(name)
        model = memo.parallelize(model, tp=2, dp=4)                # under torchrun, with 8 processes
        manager = memo.offload(model)

    Every rank passes the whole model, or the same one on the meta device, and keeps its part. A rank's number is
    ((pp · dp_size + dp) · cp_size + cp) · tp_size + tp. Ranks that differ in dp take batches of their own; all others take
    the same (batch, tokens). Loss and gradients are those of one process. With `memo.loss_without_logits` logits are neither
    computed in full nor gathered.

    Args:
        model: unmodified, from a configuration or a checkpoint, of any dtype; with adapters of PEFT or without.
        mesh: One-dimensional mesh, or one with a dimension "tp", over which the model is divided; nothing is communicated.
            None: memo makes a mesh of all ranks with the sizes below.
        tp: ranks that divide each matrix, as the configuration's `base_model_tp_plan` says, or by two rules.
        pp: ranks that divide the layers.
        dp: ranks that divide the batch, and parameters, gradients and optimizer state by fully_shard.
        cp: ranks that divide the tokens of each sequence, in all layers; in attention they exchange heads for tokens
            (Ulysses). Parameters are sharded over dp · cp ranks. For models whose attention is causal over all tokens; their
            loss is the whole sequences', their logits those of a rank's tokens.
        sequence_parallel: with tp, divides the tokens, too, between the matrices, so that a layer saves 1 / ranks of what it
            saves on one rank. The number of tokens must then be a multiple of the ranks. Not for `generate`.
        schedule: with pp: gpipe, 1f1b or interleaved-1f1b.
        microbatches: with pp: microbatches of a step (default 2 · pp).
        stage_layers: with pp, layers of each stage, as `memo plan --search` gives them, which counts bytes, too. Default:
            the stage with most FLOPs, the output projection's among them, has as few as possible.
        tokens: with pp, tokens of a sequence for that; without them attention's scores do not count.

    Returns:
        With pp a DecoderPipeline, whose `step` trains; else `model` itself. With tp or dp parameters are DTensors. Call
        `memo.offload` after this.

    Raises:
        UsageError: `mesh` is no DeviceMesh or has no dimension "tp"; the sizes are not those of the ranks; layers are not
            known to divide; heads, widths, words or layers do not divide over the ranks; fused projections on torch before
            2.13. The model is then unchanged. A forward raises it on every rank for batches that must be equal and are not,
            and for tokens that do not divide.
    """
    for name, size in {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "microbatches": microbatches, "tokens": tokens}.items():
        if size is not None and size < 1:
            raise UsageError(f"{name}={size} is less than 1")
    order = _schedule(schedule)
    staged = {
        "schedule": order is not PipelineSchedule.ONE_F_ONE_B,
        "microbatches": microbatches is not None,
        "stage_layers": bool(stage_layers),
        "tokens": tokens is not None,
    }
    if pp == 1 and (given := [name for name, is_given in staged.items() if is_given]):
        raise UsageError(f"{given[0]} has no meaning without pp; leave it out, or give pp=2 or more")
    layout = Layout(tp=tp, pp=pp, dp=dp, cp=cp, schedule=order, sequence_parallel=sequence_parallel)
    if mesh is not None:
        if layout.ranks > 1:
            raise UsageError("give memo.parallelize a mesh, or sizes without one")
        mesh = _tensor_mesh(mesh)
        layout = Layout(tp=mesh.size(), sequence_parallel=sequence_parallel)
    microbatches = microbatches or 2 * pp
    if (wrong := order.reason_unsupported(microbatches, pp)) is not None:
        raise UsageError(f"microbatches={microbatches} {wrong}")
    layers = _layers(model)
    tensor.check_sizes(model, layout.tp)
    if layout.ranks == 1:
        return model
    if pp > 1 and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UsageError(
            f"{type(model).__name__} has an encoder and a decoder, which no pipeline passes through; use tp and dp"
        )
    if any(getattr(module, "layerdrop", 0) for module in model.modules()):
        raise UsageError("layerdrop leaves layers out by chance, which ranks do not agree on; set it to 0")
    calls = ForwardCalls()
    if layout.tp > 1 or pp > 1 or cp > 1:
        calls = calls_of(model, layers, tokens=tensor.tokens_to_trace(layout.tp))
    if pp > 1:
        check_stages(model, layers, calls, layout)
        stages = _stage_ranges(layers, calls, layout.stages, tuple(stage_layers), tokens or calls.tokens)
        check_runs(model, layers, calls, stages)
        tied = _tied(model, calls)
        hidden = calls.layers[0].hidden
    if cp > 1:
        context.check_context(model, ranks=cp, tp=tp)
    if (layout.tp > 1 or cp > 1) and calls.own_backward:
        raise UsageError(
            f"{type(model).__name__} has an autograd function of its own, {calls.own_backward}, whose backward may mix the "
            f"ranks' parts; use pp and dp"
        )
    divisions = {}
    if layout.tp > 1:
        if sequence_parallel and calls.shares_hidden:
            raise UsageError(
                f"{type(model).__name__} uses hidden states between its layers elsewhere, too, and a rank has those of its "
                f"tokens; give memo.parallelize sequence_parallel=False"
            )
        divisions = tensor.find_divisions(model, calls.layers, ranks=layout.tp, sequence=sequence_parallel)
    parts = None
    if mesh is None:
        started = dist.get_world_size() if dist.is_initialized() else 1
        if started != layout.ranks:
            was = "was" if started == 1 else "were"
            raise UsageError(
                f"tp={tp}, pp={pp}, dp={dp}, cp={cp} need {layout.ranks} processes, and {started} {was} started: "
                f"torchrun --nproc-per-node {layout.ranks}"
            )
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        parts = init_device_mesh(device, (pp, dp * cp, tp), mesh_dim_names=("pp", "dp", "tp"))
        mesh = parts["tp"]
    if layout.tp > 1:
        tensor.apply(model, calls, divisions, mesh, sequence=sequence_parallel)
    if parts is None:
        return model
    sequences = None
    if cp > 1:
        shared = init_device_mesh(device, (pp * dp, cp, tp), mesh_dim_names=("pp_dp", "cp", "tp"))
        sequences = context.apply(model, shared["cp"].get_group())
        together = shared["cp", "tp"]._flatten("cp_tp").get_group()
        for layer in layers:
            note_group(layer, together)
    if pp == 1:
        if sequences is not None:
            context.divide_batches(model, sequences)
        _shard(model, layers, parts["dp"])
        return model
    own = [
        DecoderStage(model, layers, calls, stages[index], sequences)
        for index in layout.stages_of(parts.get_local_rank("pp"))
    ]
    for stage in own:
        _shard(stage, stage.layers, parts["dp"])
    return DecoderPipeline(own, parts, layout, microbatches=microbatches, hidden=hidden, tied=tied)


def _schedule(name: str) -> PipelineSchedule:
    if name not in _SCHEDULES:
        raise UsageError(f"schedule: {name!r} is none of those for models of transformers: {', '.join(_SCHEDULES)}")
    return PipelineSchedule(name)


def _tensor_mesh(mesh: DeviceMesh) -> DeviceMesh:
    if not hasattr(mesh, "mesh_dim_names"):
        raise UsageError(f"mesh: {mesh!r} is no DeviceMesh; make one with torch.distributed.init_device_mesh")
    if mesh.ndim == 1:
        return mesh
    if "tp" not in (mesh.mesh_dim_names or ()):
        raise UsageError(f"mesh: of its dimensions {mesh.mesh_dim_names} none is named 'tp'")
    return mesh["tp"]


def _layers(model: nn.Module) -> list[nn.Module]:
    try:
        return [layer.module for layer in find_layers(model)]
    except NoRepeatedLayers as error:
        raise UsageError(
            f"no repeated layers found in {type(model).__name__}; memo.parallelize divides models with a ModuleList of "
            f"equal layers"
        ) from error


def _stage_ranges(
    layers: Sequence[nn.Module], calls: ForwardCalls, stages: int, counts: tuple[int, ...], tokens: int
) -> list[range]:
    """Indices of the layers of each stage, as the counts say, or balanced without any."""
    if counts:
        if len(counts) != stages:
            raise UsageError(f"stage_layers={counts}: give a number of layers for each of the {stages} pipeline stages")
        if min(counts) < 1:
            raise UsageError(f"stage_layers={counts} has a stage of {min(counts)} layers; each has at least one")
        if sum(counts) != len(layers):
            raise UsageError(f"stage_layers={counts} add up to {sum(counts)}; the model has {len(layers)} layers")
        ends = [0, *itertools.accumulate(counts)]
        return [range(first, end) for first, end in itertools.pairwise(ends)]
    costs = [calls.cost(layer, tokens) for layer in layers]
    after = {one.module for one in calls.outside if one.layers_before}
    return balanced(costs, stages, last=sum(calls.cost(module, tokens) for module in after))


def _tied(model: nn.Module, calls: ForwardCalls) -> dict[str, str]:
    """Parameters of modules before the layers to the same ones of modules after them, by name."""
    names = {module: name for name, module in model.named_modules()}
    sides: tuple[dict[nn.Parameter, str], dict[nn.Parameter, str]] = ({}, {})
    for one in calls.outside:
        for name, parameter in one.module.named_parameters():
            sides[bool(one.layers_before)].setdefault(parameter, f"{names[one.module]}.{name}")
    return {name: sides[1][parameter] for parameter, name in sides[0].items() if parameter in sides[1]}


def _shard(root: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Shards parameters over ranks of a mesh, layer by layer."""
    if mesh.size() > 1:
        from torch.distributed.fsdp import fully_shard

        for layer in (*layers, root):
            fully_shard(layer, mesh=mesh)
