"""One rank's training step without the other ranks and without bytes.

Owns the rank's stages, their trainer and the modes around its step. The code that runs is that of `memo train`; only
weights are not drawn, and FSDP's storages give up memory that they do not have.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from memo.allocator import AllocationRecorder, BytelessMode
from memo.autoplan import settings_of
from memo.dry_run.fsdp_storages import storages_without_memory
from memo.dry_run.recorded_collectives import CollectiveCall, IssuedCollectives
from memo.gpt import Precision, TrainConfig
from memo.gpt.arithmetic import Ranks
from memo.gpt.model import Experts, sharded_stages
from memo.gpt.optim import LrSchedule, empty_state
from memo.gpt.train import ParallelTrainer, rows_seen, weight_dtype
from memo.machine import replay_rates
from memo.mip.activation import extract_stage_plan
from memo.parallel import Layout, PipelineOrder, simulated_rank
from memo.record import OffloadWithoutBytes
from memo.swap import find_layers

if TYPE_CHECKING:
    from memo.gpt.arithmetic import PlannedRun
    from memo.mip.activation import ActivationPlan

_CPU = torch.device("cpu")
_WARM_UP = 3
"""Steps in which replays are tried and the order of backward is learned."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """What one rank does in one step."""

    rank: int
    calls: tuple[CollectiveCall, ...]
    """In order."""
    states_bytes: int
    """Parameters and optimizer state of this rank."""
    peak_bytes: int
    """Most bytes on the device at once, with all that stands from before the step."""


def step_of_rank(run: PlannedRun, rank: int) -> RankStep:
    """Runs a step of a rank, after those in which its plan's replays are tried.

    The process must have no process group.

    Raises:
        RecordError: the step issues a collective that memo's training does not have.
    """
    with simulated_rank(run.layout, rank) as world:
        autocast = torch.bfloat16 if run.precision is Precision.BF16_AUTOCAST else None
        stages = sharded_stages(
            run.config,
            world,
            seq=run.tokens,
            dtype=weight_dtype(run.precision),
            autocast=autocast,
            sparse_embedding=run.sparse_embedding,
        )
        recorder = AllocationRecorder()
        with (
            BytelessMode(assume=1.0),
            recorder,
            storages_without_memory(recorder),
            _equal_arrivals(),
        ):
            for stage in stages:
                stage.to_empty(device=_CPU)
            trainer = ParallelTrainer(
                stages, world, _NoTokens(run.rows, run.tokens), _training(run), device=_CPU, rows=run.rows
            )
            trainer.sparse_embedding.rows_seen = _rows_of_distinct_tokens(run)
            offload = None if run.plan is None else _offload(run.plan, trainer)
            empty_state(trainer.optimizer)
            recorder.begin_step()
            states = _standing(recorder)
            for step in range(_WARM_UP if offload is not None else 0):
                with IssuedCollectives():
                    trainer.step(1 + step)
            recorder.begin_step()
            with IssuedCollectives() as issued:
                trainer.step(1 + _WARM_UP)
            peak = _standing(recorder) + recorder.trace(exact=True).peak_nbytes
    return RankStep(rank=rank, calls=tuple(issued.calls), states_bytes=states, peak_bytes=peak)


def _standing(recorder: AllocationRecorder) -> int:
    return sum(storage.nbytes() for storage in recorder.standing())


def _offload(plan: ActivationPlan, trainer: ParallelTrainer) -> OffloadWithoutBytes | None:
    """Has the trainer's forwards run under the plan of its stage; None where nothing moves and nothing is recomputed."""
    if not any(layer.recomputes or layer.host or layer.disk for layer in plan.layers):
        return None
    machine, stages = plan.problem.machine_of(trainer.world.pp).hardware, trainer.stages
    model = nn.ModuleList(stages)
    layers = find_layers(model, [layer for stage in stages for layer in stage.layers.values()])
    offload = OffloadWithoutBytes(model, layers, 1.0, rates=replay_rates(machine))
    if trainer.schedule is not None:
        order = PipelineOrder.of(trainer.schedule, [layer.module for layer in layers])
        if order is not None:
            offload.engine.expect(order.backward)
    own = plan if plan.problem.pipeline.stages == 1 else extract_stage_plan(plan, trainer.world.pp)
    placements, chosen = settings_of(own, layers)
    offload.engine.place(placements)
    offload.tapes.choose(chosen)
    offload.tapes.begin_forwards(layers)
    trainer.around_forward = offload.manager
    return offload


def groups_of_rank(layout: Layout, rank: int) -> dict[Ranks, list[int]]:
    """Global numbers of the ranks of a rank's process groups, as torch's mesh makes them."""
    with simulated_rank(layout, rank) as world:
        groups = {
            Ranks.TENSOR: world.group("tp"),
            Ranks.CONTEXT: world.group("cp"),
            Ranks.STAGES: world.group("pp"),
            Ranks.REPLICAS: world.replicas.get_group(),
            Ranks.ALL: dist.group.WORLD,
        }
        if world.expert_ranks is not None and world.expert_replicas is not None:
            groups[Ranks.EXPERTS] = world.expert_ranks.get_group()
            groups[Ranks.EXPERT_COPIES] = world.expert_replicas.get_group()
        if layout.shards_tokens:
            groups[Ranks.TOKENS] = world.token_ranks.get_group()
        return {name: dist.get_process_group_ranks(group) for name, group in groups.items()}


def _training(run: PlannedRun) -> TrainConfig:
    schedule = LrSchedule(peak=1e-4, floor=1e-5, warmup=0, steps=10)
    return TrainConfig(schedule=schedule, accumulate=run.microbatches, precision=run.precision)


class _NoTokens:
    """Batches of token 0; which tokens they are changes no shape."""

    def __init__(self, rows: int, tokens: int) -> None:
        self._shape = rows, tokens

    def at(self, step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(self._shape, dtype=torch.int64), torch.zeros(self._shape, dtype=torch.int64)


def _rows_of_distinct_tokens(run: PlannedRun) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rows that a rank's tokens of a step touch in the embedding, if all are distinct: the most that the plan counts.

    A gradient without contents has no row of zeros, so the search finds all rows.
    """
    tokens = run.rows // run.layout.dp * run.tokens // run.layout.cp * run.microbatches
    return lambda grad: rows_seen(grad)[:tokens].clone()


@contextlib.contextmanager
def _equal_arrivals() -> Iterator[None]:
    """Has ranks get equally many rows, and each of their experts: tokens without contents choose none."""
    counted = Experts.exchanged_counts

    def equal(sorted_experts: torch.Tensor, count: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        counted(sorted_experts, count, group)
        own = count // group.size()
        counts = torch.tensor(
            [each for rows in _shares(len(sorted_experts), group.size()) for each in _shares(rows, own)]
        )
        return counts, counts.clone()

    Experts.exchanged_counts = equal  # type: ignore[method-assign]
    try:
        yield
    finally:
        Experts.exchanged_counts = counted  # type: ignore[method-assign]


def _shares(total: int, parts: int) -> list[int]:
    each, more = divmod(total, parts)
    return [each + (part < more) for part in range(parts)]
