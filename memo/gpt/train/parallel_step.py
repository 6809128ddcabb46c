"""Training step on many ranks, with the same batches, losses and weights as in one process.

Owns a rank's part of each batch, the order of forward and backward (sequential, or a pipeline schedule's), and the sums over
ranks. The rest of a step is the Trainer's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from memo.compression import GradientCompression, compress_gradients
from memo.gpt.model.init_weights import seed_of
from memo.gpt.model.pipeline_stage import PipelineStage
from memo.gpt.optim.optimizer import empty_state
from memo.gpt.train.embedding_gradients import SparseEmbeddingGradient
from memo.gpt.train.expert_rows import ExpertRows, ExpertRowsMeter
from memo.gpt.train.gradient_compression import STATE
from memo.gpt.train.step import BatchSource, Trainer
from memo.gpt.train_config import TrainConfig
from memo.parallel import World, clip_gradients, gradient_norm, make_schedule, pass_through


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """One rank's part of a microbatch, or of several microbatches concatenated."""

    tokens: torch.Tensor
    """Input tokens, int64, (rows, tokens of this rank)."""
    targets: torch.Tensor
    """Target tokens, int64, of the same shape."""
    rows: torch.Tensor | None
    """All tokens of the rows, (rows, seq), from which document ends are found; None without document boundaries."""

    @classmethod
    def join(cls, batches: Sequence[RankBatch]) -> RankBatch:
        """Concatenates microbatches; a pipeline schedule splits them again."""
        rows = [batch.rows for batch in batches if batch.rows is not None]
        return cls(
            tokens=torch.cat([batch.tokens for batch in batches]),
            targets=torch.cat([batch.targets for batch in batches]),
            rows=torch.cat(rows) if rows else None,
        )


class RankBatches:
    """Source of a rank's part of every microbatch: some of the rows, and some of their tokens."""

    def __init__(self, whole: BatchSource, world: World, stage: PipelineStage, device: torch.device) -> None:
        self._whole = whole
        self._world = world
        self._own = stage.own
        self._whole_rows = stage.config.end_of_document is not None
        self._device = device

    def at(self, step: int, microbatch: int = 0) -> RankBatch:
        """This rank's part of a microbatch, on the device."""
        tokens, targets = self._whole.at(step, microbatch)
        rows = tokens.shape[0] // self._world.layout.dp
        mine = slice(self._world.dp * rows, (self._world.dp + 1) * rows)
        return RankBatch(
            tokens=self._own.of(tokens[mine]).contiguous().to(self._device),
            targets=self._own.of(targets[mine]).contiguous().to(self._device),
            rows=tokens[mine].to(self._device) if self._whole_rows else None,
        )


class ParallelTrainer(Trainer):
    """Trainer of one rank's pipeline stages. Every rank calls the same methods in the same order.

    Args:
        stages: this rank's stages, in the order of the layers.
        world: the ranks.
        batches: source of the tokens of all ranks.
        config: numbers of the step loop.
        device: this rank's device.
        rows: sequences in a microbatch of all ranks together.
        seed: seed of dropout.
        around_forward: context manager of every forward pass, such as memo's manager; None is none.
        compression: exchange of the gradients that FSDP reduces; None is exact.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        world: World,
        batches: BatchSource,
        config: TrainConfig,
        *,
        device: torch.device,
        rows: int,
        seed: int = 0,
        around_forward: AbstractContextManager[Any] | None = None,
        compression: GradientCompression | None = None,
    ) -> None:
        self.stages = stages
        self.world = world
        self.seed = seed
        super().__init__(nn.ModuleList(stages), batches, config, device=device, around_forward=around_forward)
        self._rank_batches = RankBatches(batches, world, stages[0], device)
        self._rows = rows // world.layout.dp
        self.schedule = self._make_schedule() if world.layout.pp > 1 else None
        """torch's pipeline schedule; None without pipeline parallelism."""
        self._tied = TiedEmbedding(stages, world)
        self._rows_of_experts = ExpertRowsMeter(stages, device, world.layout)
        self.sparse_embedding = SparseEmbeddingGradient(stages, world)
        """Exchange of the embedding's gradient as rows; does nothing where FSDP reduces it."""
        if compression is not None:
            self.compressed = compress_gradients(self.model, compression)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of all stages under the whole model's names, each name once."""
        seen: set[str] = set()
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                if name not in seen:
                    seen.add(name)
                    yield name, parameter

    def _gradients(self, step: int, stop: Callable[[], bool]) -> tuple[float, int] | None:
        if self._agree(stop()):
            return None
        self._rows_of_experts.restart()  # evaluations count, too
        if self.compressed is not None:
            self.compressed.drop()  # of a step that was skipped or undone
        torch.manual_seed(seed_of(self.seed, step, self.world.pp, self.world.dp, self.world.token_shard))
        losses = self._sequential(step) if self.schedule is None else self._pipelined(step)
        self._tied.add_gradients()
        self.sparse_embedding.exchange()
        layout = self.world.layout
        mean = self._mean(losses, self.config.accumulate)
        own = self._rows * len(self.stages[0].own)
        tokens = self.config.accumulate * own * layout.dp * layout.token_shards
        return mean, tokens

    def _expert_rows(self) -> ExpertRows | None:
        return self._rows_of_experts.take()

    def _mean(self, losses: Sequence[torch.Tensor], microbatches: int) -> float:
        """Mean loss over all ranks: the sum of the stages' terms, which tensor-parallel ranks have alike."""
        layout = self.world.layout
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for loss in losses:
            total += loss.double()
        dist.all_reduce(total)
        return float((total / (microbatches * layout.dp * layout.cp * layout.tp)).float())

    def evaluate(self, batches: BatchSource) -> float:
        """Mean loss over `config.eval_steps` batches of all ranks, without gradients, dropout or offloading."""
        rank_batches = RankBatches(batches, self.world, self.stages[0], self.device)
        self.model.eval()
        try:
            with torch.no_grad():
                losses = [self._forward(rank_batches.at(index)) for index in range(self.config.eval_steps)]
        finally:
            self.model.train()
            self._reshard()
        return self._mean([loss for loss in losses if loss is not None], self.config.eval_steps)

    def _reshard(self) -> None:
        """Reshards parameters that forwards without a backward left gathered; the optimizer holds the sharded ones."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _forward(self, batch: RankBatch) -> torch.Tensor | None:
        """Loss of a batch that passes through all stages; None on ranks without the last one."""
        if self.schedule is None:
            return cast("torch.Tensor", self.stages[0](batch.tokens, batch.targets, batch.rows))
        return pass_through(
            self.world.layout,
            self._by_index,
            self.world.group("pp"),
            batch.tokens,
            hidden=self._hidden(),
            targets=batch.targets,
            rows=batch.rows,
        )

    def _sequential(self, step: int) -> list[torch.Tensor]:
        """Forward and backward of each microbatch in turn, without a pipeline."""
        (stage,) = self.stages
        losses = []
        for microbatch in range(self.config.accumulate):
            batch = self._rank_batches.at(step, microbatch)
            last = microbatch == self.config.accumulate - 1
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.set_requires_gradient_sync(last, recurse=False)
            with self.around_forward:
                loss = stage(batch.tokens, batch.targets, batch.rows)
            (loss / self.config.accumulate).backward()
            losses.append(loss.detach())
        return losses

    def _pipelined(self, step: int) -> list[torch.Tensor]:
        batch = RankBatch.join([self._rank_batches.at(step, index) for index in range(self.config.accumulate)])
        losses: list[torch.Tensor] = []
        first = (batch.tokens,) if self.stages[0].is_first else ()
        last = {"target": batch.targets, "losses": losses, "targets": batch.targets} if self._holds_last else {}
        every = {} if batch.rows is None else {"rows": batch.rows}
        assert self.schedule is not None
        with self.around_forward:
            self.schedule.step(*first, **last, **every, return_outputs=False)
        return [*losses, *(loss for stage in self.stages for loss in stage.take_router_losses())]

    @property
    def _holds_last(self) -> bool:
        return any(stage.is_last for stage in self.stages)

    @property
    def _by_index(self) -> dict[int, PipelineStage]:
        return dict(zip(self.world.layout.stages_of(self.world.pp), self.stages, strict=True))

    def _hidden(self) -> torch.Tensor:
        """Hidden states that pass between stages, (rows, tokens, hidden), on the meta device."""
        stage = self.stages[0]
        shape = (self._rows, len(stage.own), stage.config.hidden)
        return torch.empty(shape, dtype=stage.passed_dtype, device="meta", requires_grad=True)

    def _make_schedule(self) -> Any:
        return make_schedule(
            self.world.layout,
            self._by_index,
            self.world.group("pp"),
            tokens=torch.empty(self._rows, len(self.stages[0].own), dtype=torch.int64, device="meta"),
            hidden=self._hidden(),
            microbatches=self.config.accumulate,
            device=self.device,
        )

    def _clip(self) -> float:
        layout = self.world.layout
        second = {
            id(stage.tokens.weight) for stage in self.stages if stage.repeats_embedding and stage.tokens is not None
        }
        counted = [parameter for parameter in self.model.parameters() if id(parameter) not in second]
        norm = gradient_norm(counted, copies=layout.ranks // layout.pp)
        if self.config.clip is not None:
            clip_gradients(self.model.parameters(), norm, self.config.clip)
        return norm

    def _agree(self, stop: bool) -> bool:
        """True if any rank was asked to stop."""
        asked = torch.tensor(int(stop), device=self.device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked)

    def state(self) -> dict[str, Any]:
        """State of this rank's part of model and optimizer, as the Trainer's, and of its compressed exchanges."""
        return self._state_of(dict(self.named_parameters())) | self._compression_state()

    def states(self, *, with_compression: bool = False) -> list[dict[str, Any]]:
        """States to load a checkpoint into: `state`, and the second copy of a tied embedding on this rank.

        Args:
            with_compression: the checkpoint has this layout's state of compressed exchanges.
        """
        first = self._state_of(dict(self.named_parameters())) | (self._compression_state() if with_compression else {})
        seconds = dict(pair for stage in self.stages for pair in stage.named_parameters())  # the last of each name
        return [first, self._state_of(seconds)] if self._tied.twice_on_a_rank else [first]

    def _compression_state(self) -> dict[str, Any]:
        state = {} if self.compressed is None else self.compressed.state()
        return {STATE: state} if state else {}

    def _state_of(self, parameters: dict[str, nn.Parameter]) -> dict[str, Any]:
        if not self.optimizer.state:
            empty_state(self.optimizer)
        known = dict(self.optimizer.state)  # the original is a defaultdict, which would hide a missing parameter
        return {
            "model": {name: parameter.detach() for name, parameter in parameters.items()},
            "optimizer": {name: dict(known[parameter]) for name, parameter in parameters.items()},
        }


class TiedEmbedding:
    """Tied embedding in a pipeline: the first and the last stage hold equal copies, and both get the summed gradient.

    Args:
        stages: of this rank.
        world: the ranks.
    """

    def __init__(self, stages: Sequence[PipelineStage], world: World) -> None:
        self._copies: list[nn.Parameter] = []
        self._group: dist.ProcessGroup | None = None
        self.twice_on_a_rank = False
        config, layout = stages[0].config, world.layout
        if not config.tie_embeddings or layout.pp == 1:
            return
        self._copies = [cast("nn.Parameter", stage.tokens.weight) for stage in stages if stage.tokens is not None]
        last = next(rank for rank in range(layout.pp) if layout.stages - 1 in layout.stages_of(rank))
        self.twice_on_a_rank = last == 0
        if last == 0:
            return
        ranks = world.mesh.mesh[[0, last]].flatten(1).T.tolist()
        self._group, _ = dist.new_subgroups_by_enumeration(ranks)

    def add_gradients(self) -> None:
        """Gives both copies the sum of their gradients. A collective call of the ranks that have one."""
        if not self._copies:
            return
        locals_ = [_local(copy.grad) for copy in self._copies]
        total = locals_[0].clone()
        for other in locals_[1:]:
            total += other
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        for local in locals_:
            local.copy_(total)


def _local(grad: torch.Tensor | None) -> torch.Tensor:
    assert grad is not None
    return cast("torch.Tensor", getattr(grad, "_local_tensor", grad))
