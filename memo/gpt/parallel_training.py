"""The training step of a model that is divided over ranks: same batches, same losses, same weights as in one process.

Owns what a rank takes of each batch, the order of forward and backward (its own, or a pipeline schedule's), and the sums
over ranks. The rest of a step is the Trainer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from memo.gpt.initial import seed_of
from memo.gpt.optimizer import empty_state
from memo.gpt.stage import Stage
from memo.gpt.train_config import TrainConfig
from memo.gpt.training import BatchSource, Trainer
from memo.parallel.gradients import clip_gradients, gradient_norm
from memo.parallel.pipeline import make_schedule
from memo.parallel.world import World

__all__ = ["ParallelTrainer", "RankBatches"]


class RankBatches:
    """A rank's part of every microbatch: some rows, and of these some tokens."""

    def __init__(self, whole: BatchSource, world: World, stage: Stage) -> None:
        self._whole = whole
        self._world = world
        self._tokens = stage.own.slice

    def at(self, step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, targets) of that microbatch, contiguous."""
        tokens, targets = self._whole.at(step, microbatch)
        rows = tokens.shape[0] // self._world.layout.dp
        mine = slice(self._world.dp * rows, (self._world.dp + 1) * rows)
        return tokens[mine, self._tokens].contiguous(), targets[mine, self._tokens].contiguous()


class ParallelTrainer(Trainer):
    """Steps a rank's stages. Every rank calls the same methods in the same order."""

    def __init__(
        self,
        stages: Sequence[Stage],
        world: World,
        batches: BatchSource,
        config: TrainConfig,
        *,
        device: torch.device,
        rows: int,
        seed: int = 0,
        around_forward: AbstractContextManager[Any] | None = None,
    ) -> None:
        """`rows` is the number of sequences in a microbatch of all ranks together."""
        self.stages = stages
        self.world = world
        self.seed = seed
        ours = RankBatches(batches, world, stages[0])
        super().__init__(nn.ModuleList(stages), ours, config, device=device, around_forward=around_forward)
        self.schedule = self._make_schedule(rows // world.layout.dp) if world.layout.pp > 1 else None
        """torch's pipeline schedule, with its order."""
        self._tied = _TiedEmbedding(stages, world)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Under the whole model's names, each name once."""
        seen: set[str] = set()
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                if name not in seen:
                    seen.add(name)
                    yield name, parameter

    def _gradients(self, step: int, stop: Callable[[], bool]) -> tuple[float, int] | None:
        if self._agree(stop()):
            return None
        torch.manual_seed(seed_of(self.seed, step, self.world.pp, self.world.dp, self.world.token_shard))
        losses = self._one_by_one(step) if self.schedule is None else self._pipelined(step)
        self._tied.add_gradients()
        layout = self.world.layout
        mean = self._mean(losses, self.config.accumulate)
        tokens = self.config.accumulate * self._batches.at(step)[0].numel() * layout.dp * layout.token_shards
        return mean, tokens

    def _mean(self, losses: Sequence[torch.Tensor], microbatches: int) -> float:
        """Over all ranks: those of the last stage have the losses of their rows, alike under tp; the others have none."""
        layout = self.world.layout
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for loss in losses:
            total += loss.double()
        dist.all_reduce(total)
        return float((total / (microbatches * layout.dp * layout.cp * layout.tp)).float())

    def evaluate(self, batches: BatchSource) -> float:
        """As the Trainer's, of every rank's part. Not for pipelines, whose forwards run under a schedule."""
        (stage,) = self.stages
        ours = RankBatches(batches, self.world, stage)
        stage.eval()
        try:
            with torch.no_grad():
                losses = [stage(*self._to_device(ours.at(index))) for index in range(self.config.eval_steps)]
        finally:
            stage.train()
        return self._mean(losses, self.config.eval_steps)

    def _one_by_one(self, step: int) -> list[torch.Tensor]:
        """No pipeline: forward and backward of each microbatch in turn."""
        (stage,) = self.stages
        losses = []
        for microbatch in range(self.config.accumulate):
            inputs, targets = self._to_device(self._batches.at(step, microbatch))
            last = microbatch == self.config.accumulate - 1
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.set_requires_gradient_sync(last, recurse=False)
            with self._around_forward:
                loss = stage(inputs, targets)
            (loss / self.config.accumulate).backward()
            losses.append(loss.detach())
        return losses

    def _pipelined(self, step: int) -> list[torch.Tensor]:
        both = [self._batches.at(step, microbatch) for microbatch in range(self.config.accumulate)]
        inputs, targets = self._to_device((torch.cat([b[0] for b in both]), torch.cat([b[1] for b in both])))
        losses: list[torch.Tensor] = []
        first = (inputs,) if self.stages[0].is_first else ()
        last = {"target": targets, "losses": losses, "targets": targets} if self._holds_last else {}
        assert self.schedule is not None
        with self._around_forward:
            self.schedule.step(*first, **last, return_outputs=False)
        return losses

    @property
    def _holds_last(self) -> bool:
        return any(stage.is_last for stage in self.stages)

    def _make_schedule(self, rows: int) -> Any:
        config = self.stages[0].config
        own = len(self.stages[0].own)
        weight = next(self.stages[0].parameters())
        stages = self.world.layout.stages_of(self.world.pp)
        return make_schedule(
            self.world.layout,
            dict(zip(stages, self.stages, strict=True)),
            self.world.group("pp"),
            tokens=torch.empty(rows, own, dtype=torch.int64, device="meta"),
            hidden=torch.empty(rows, own, config.hidden, dtype=weight.dtype, device="meta", requires_grad=True),
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
        """Whether any rank was asked to stop."""
        asked = torch.tensor(int(stop), device=self.device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked)

    def state(self) -> dict[str, Any]:
        """As the Trainer's, of this rank's part."""
        return self._state_of(dict(self.named_parameters()))

    def states(self) -> list[dict[str, Any]]:
        """What a checkpoint has to be read into: `state`, and what this rank holds a second time."""
        seconds = dict(pair for stage in self.stages for pair in stage.named_parameters())  # the later of one name
        return [self.state(), self._state_of(seconds)] if self._tied.twice_on_a_rank else [self.state()]

    def _state_of(self, parameters: dict[str, nn.Parameter]) -> dict[str, Any]:
        if not self.optimizer.state:
            empty_state(self.optimizer)
        return {
            "model": {name: parameter.detach() for name, parameter in parameters.items()},
            "optimizer": {name: dict(self.optimizer.state[parameter]) for name, parameter in parameters.items()},
        }


class _TiedEmbedding:
    """The first and the last stage each hold the embedding: equal weights, so the sum of both gradients for both."""

    def __init__(self, stages: Sequence[Stage], world: World) -> None:
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
