"""Construction of one rank's part of a GPT: split and sharded on the meta device, then allocated and initialised.

    meta GPT -> stages -> tensor parallel, context parallel -> fully_shard -> to_empty -> initialise

Invariant: a rank never holds more than its part, and one whole parameter at a time during initialisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from memo.gpt.config import GPTConfig, expert_shard_dimension
from memo.gpt.model.experts import MoeMlp
from memo.gpt.model.half_layers import run_in_halves
from memo.gpt.model.init_weights import initialise
from memo.gpt.model.model import GPT, Attention, Block
from memo.gpt.model.pipeline_stage import PipelineStage
from memo.loss import VocabularyShard
from memo.parallel import (
    ColumnParallel,
    Entry,
    Replicated,
    Ring,
    RowParallel,
    SequenceShards,
    Ulysses,
    VocabularyParallel,
    World,
    divide_experts,
)


def build_stages(
    shape: GPTConfig,
    world: World,
    *,
    seq: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    autocast: torch.dtype | None = None,
    sparse_embedding: bool = False,
) -> list[PipelineStage]:
    """Builds this rank's pipeline stages, with weights.

    Args:
        shape: the whole model.
        world: the ranks.
        seq: tokens of a whole sequence.
        device: the device of this rank.
        dtype: data type of the parameters.
        seed: seed of the initial weights; the same on all ranks.
        autocast: data type of matrix products under autocast; None without.
        sparse_embedding: leave the embedding whole on every replica, for an exchange of its gradient as rows; its matrix
            is not the output projection's.

    Returns:
        The stages, in the order of the layers.
    """
    stages = sharded_stages(shape, world, seq=seq, dtype=dtype, autocast=autocast, sparse_embedding=sparse_embedding)
    for stage in stages:
        stage.to_empty(device=device)
        initialise(stage, shape, seed)
    return stages


def sharded_stages(
    shape: GPTConfig,
    world: World,
    *,
    seq: int,
    dtype: torch.dtype,
    autocast: torch.dtype | None = None,
    sparse_embedding: bool = False,
) -> list[PipelineStage]:
    """Builds this rank's pipeline stages on the meta device, divided and sharded, without weights.

    Args as for `build_stages`.
    """
    stages = divided_stages(shape, world, seq=seq, dtype=dtype, autocast=autocast)
    for stage in stages:
        stage.sparse_embedding = sparse_embedding and stage.is_first and world.replicas.size() > 1
        _shard(stage, world)
    return stages


def divided_stages(
    shape: GPTConfig, world: World, *, seq: int, dtype: torch.dtype, autocast: torch.dtype | None = None
) -> list[PipelineStage]:
    """Builds this rank's pipeline stages on the meta device, with parameters not yet sharded over replicas.

    Args as for `build_stages`.
    """
    layout = world.layout
    whole, rings = SequenceShards.whole(seq), layout.rings(shape)
    attended = whole.early_and_late(world.cp, layout.cp) if rings else whole.shard(world.cp, layout.cp)
    own = attended.shard(world.tp, layout.tp) if layout.shards_tokens else attended
    stages: list[PipelineStage] = []
    for index in layout.stages_of(world.pp):
        stage = PipelineStage(
            GPT(shape, device="meta", dtype=dtype),
            layers=layout.layers_of(index, shape.layers),
            own=own,
            attended=attended,
            autocast=autocast,
        )
        _divide_layers(stage, world)
        _divide_experts(stage, world)
        _divide_ends(stage, world)
        stages.append(stage)
    return stages


def _divide_layers(stage: PipelineStage, world: World) -> None:
    """Applies tensor and context parallelism to each layer."""
    layout = world.layout
    sequence = layout.shards_tokens
    for layer in stage.layers.values():
        attention = cast("Attention", layer.attention)
        if layout.rings(stage.config):
            attention.attend = Ring(world.group("cp"))
        elif layout.cp > 1:
            attention.attend = Ulysses(attention.attend, world.group("cp"))
            attention.attend_within = Ulysses(attention.attend_within, world.group("cp"))
        if layout.tp > 1:
            column, row = ColumnParallel(sequence=sequence), RowParallel(sequence=sequence)
            entry, norm = Entry(sequence=sequence), Replicated(sequence=sequence)
            plan = {
                "norm*": norm,
                "attention": entry,
                "attention.qkv": column,
                "attention.out": row,
            }
            # Of a mixture the shared experts alone are divided; the others see a rank's own tokens.
            mlp = "mlp.shared" if isinstance(layer.mlp, MoeMlp) else "mlp"
            names = {name for name, _ in layer.named_modules()}
            ways = {mlp: entry, f"{mlp}.gate": column, f"{mlp}.up": column, f"{mlp}.down": row}
            plan |= {name: way for name, way in ways.items() if name in names}
            parallelize_module(layer, world.mesh["tp"], plan)
            if layout.tp_overlap:
                cast("Block", layer).in_halves = run_in_halves


def _divide_experts(stage: PipelineStage, world: World) -> None:
    """Applies expert parallelism, and lets routers balance over the tokens of all replicas."""
    for mlp in _mixtures(stage):
        if world.token_ranks.size() > 1:
            mlp.router.group = world.token_ranks.get_group()
        if world.layout.shards_tokens:
            mlp.router.sharers = world.group("tp")
        if world.expert_ranks is not None:
            divide_experts(mlp.experts, world.expert_ranks)
            mlp.experts.group = world.expert_ranks.get_group()


def _mixtures(stage: PipelineStage) -> list[MoeMlp]:
    return [layer.mlp for layer in stage.layers.values() if isinstance(layer.mlp, MoeMlp)]


def _divided_dimension(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard]:
    """Dimension by which parameters are sharded: rows, but of experts that are not whole ones for each rank their inputs."""

    def dimension(parameter: nn.Parameter) -> Shard:
        if parameter.dim() < 3:  # not of experts: (experts, inputs, outputs)
            return Shard(0)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return Shard(expert_shard_dimension(*local.shape[:2], shards=mesh.size()))

    return dimension


def _divide_ends(stage: PipelineStage, world: World) -> None:
    """Applies tensor parallelism to embedding, last norm and output projection; each rank has a part of the vocabulary."""
    layout = world.layout
    if layout.tp == 1:
        return
    mesh, rows = world.mesh["tp"], VocabularyParallel(sequence=layout.shards_tokens)
    for table in (stage.tokens, stage.head):
        if table is not None:
            rows._apply(table, mesh)
    if stage.norm is not None:
        Replicated(sequence=layout.shards_tokens)._apply(stage.norm, mesh)
    stage.vocabulary = VocabularyShard.of(
        stage.config.vocab_size, world.group("tp"), divides_tokens=layout.shards_tokens
    )


def _shard(stage: PipelineStage, world: World) -> None:
    """Shards parameters over replicas; the position table over all ranks with different tokens.

    In a pipeline, parameters stay gathered between a microbatch's forward and its backward, since gathering them again for
    each microbatch would cost more than it saves.
    """
    reshard = world.layout.pp == 1

    def over_token_ranks(module: nn.Module, mesh: DeviceMesh, *, copies: int) -> None:
        """Shards over ranks that hold different tokens of `copies` batches."""
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, shard_placement_fn=_divided_dimension(mesh))
        if mesh.size() == copies:
            return
        # Tensor-parallel ranks have the same loss but different tokens, so their gradients are added, not averaged. It is a
        # sum divided afterwards, since gloo divides by the number of ranks only.
        sharded = cast("FSDPModule", module)
        sharded.set_gradient_divide_factor(copies)
        sharded.set_force_sum_reduction_for_comms(True)

    divides_tokens, copies = world.token_ranks.size() > world.replicas.size(), world.replicas.size()
    if stage.positions is not None and divides_tokens:
        over_token_ranks(stage.positions, world.token_ranks, copies=copies)
    for mlp in _mixtures(stage):
        if world.expert_replicas is not None:
            over_token_ranks(mlp.experts, world.expert_replicas, copies=copies // world.layout.ep)
        for part in (mlp.router, mlp.experts, mlp.descend, mlp.ascend) if divides_tokens else ():
            if part is not None and not isinstance(part, FSDPModule):
                over_token_ranks(part, world.token_ranks, copies=copies)
    if world.replicas.size() > 1:
        divided = _divided_dimension(world.replicas)
        for name, layer in stage.layers.items():
            # The last layer's backward comes at once: gathered again, it would wait for the network. Its experts are
            # gathered again where they are sharded apart: a recorded layer must gather within itself in each call.
            last = int(name) == stage.config.layers - 1
            fully_shard(
                layer, mesh=world.replicas, reshard_after_forward=reshard and not last, shard_placement_fn=divided
            )
        whole = set(stage.tokens.parameters()) if stage.sparse_embedding and stage.tokens is not None else None
        fully_shard(stage, mesh=world.replicas, reshard_after_forward=False, ignored_params=whole)
    elif world.layout.pp > 1:
        sharded = {
            parameter for part in stage.modules() if isinstance(part, FSDPModule) for parameter in part.parameters()
        }
        if sharded:  # of a stage that FSDP knows, torch's pipeline reduces gradients after the last microbatch alone
            others = set(stage.parameters()) - sharded
            fully_shard(stage, mesh=world.token_ranks, reshard_after_forward=False, ignored_params=others)
