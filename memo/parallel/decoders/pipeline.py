"""A model of transformers as this rank's part of a pipeline: steps, gradients of tied weights, parameters by their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from memo.errors import UsageError
from memo.parallel.decoders.stages import DecoderStage
from memo.parallel.decoders.tensor import check_tokens
from memo.parallel.grad_norm import clip_gradients, gradient_norm
from memo.parallel.layout import Layout
from memo.parallel.pipeline import make_schedule
from memo.parallel.rank_agreement import require_same_batch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class DecoderPipeline(nn.Module):
    """This rank's stages of a model, made by `memo.parallelize(model, pp=...)`.

        pipeline = memo.parallelize(model, tp=2, pp=2, dp=2, microbatches=4)
        optimizer = torch.optim.AdamW(pipeline.parameters())
        loss = pipeline.step(input_ids=ids, labels=ids)       # forwards and backwards of a whole step
        optimizer.step()
        optimizer.zero_grad()

    With memo.offload: `manager = memo.offload(pipeline, layers=pipeline.layers, schedule=pipeline.schedule(rows, tokens))`
    and each step within `with manager:`.
    """

    def __init__(
        self,
        stages: Sequence[DecoderStage],
        mesh: DeviceMesh,
        layout: Layout,
        *,
        microbatches: int,
        hidden: tuple[torch.Size, torch.dtype],
        tied: dict[str, str],
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self._mesh, self._layout, self._microbatches = mesh, layout, microbatches
        self._sizes, self._dtype = hidden
        self._schedule: tuple[tuple[int, int], Any] | None = None
        self._tied = tied
        self.config = stages[0].model.config

    @property
    def layers(self) -> list[nn.Module]:
        """Layers of this rank, in the order of the model."""
        return [layer for stage in self._own_stages for layer in stage.layers]

    @property
    def _own_stages(self) -> list[DecoderStage]:
        return [stage for stage in self.stages if isinstance(stage, DecoderStage)]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank's stages by their names in the model."""
        for stage in self._own_stages:
            yield from stage.model.named_parameters(*args, **kwargs)

    def schedule(self, rows: int, tokens: int) -> Any:
        """Torch's schedule for batches of this shape, of one data-parallel rank.

        Raises:
            UsageError: the microbatches do not divide the rows, or are too few for the schedule.
        """
        if self._schedule is None or self._schedule[0] != (rows, tokens):
            count = self._microbatches
            if rows % count:
                raise UsageError(f"{count} microbatches do not divide the {rows} rows of a data-parallel rank's batch")
            layout = self._layout
            own = layout.stages_of(self._mesh.get_local_rank("pp"))
            made = make_schedule(
                layout,
                dict(zip(own, self.stages, strict=True)),
                self._mesh.get_group("pp"),
                tokens=torch.empty(rows // count, tokens, dtype=torch.int64, device="meta"),
                hidden=torch.empty(
                    (rows // count, tokens // layout.token_shards, *self._sizes),
                    dtype=self._dtype,
                    device="meta",
                    requires_grad=True,
                ),
                microbatches=count,
                device=next(self.parameters()).device,
            )
            self._schedule = (rows, tokens), made
        return self._schedule[1]

    def step(self, *, input_ids: torch.Tensor, labels: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """Runs all forwards and backwards of a batch. A collective call of all ranks.

        Args:
            input_ids: (rows, tokens) of this data-parallel rank, on every rank of its pipeline.
            labels: (rows, tokens).
            named: further arguments of the model of (rows, ...), such as `attention_mask`.

        Returns:
            The loss, the mean over microbatches and data-parallel ranks, on every rank. Gradients are of this mean.

        Raises:
            UsageError: as `schedule`; an argument cannot be divided into microbatches.
        """
        rows, tokens = input_ids.shape
        require_same_batch(self._mesh.get_group("pp"), input_ids, labels)
        for name, value in named.items():
            if not isinstance(value, torch.Tensor) or value.shape[:1] != (rows,):
                raise UsageError(
                    f"{name} is no tensor of {rows} rows, of which each microbatch takes its own; leave it out"
                )
        if self._layout.shards_tokens:
            check_tokens(tokens, self._layout.token_shards)
        losses: list[torch.Tensor] = []
        first = (input_ids,) if any(stage.is_first for stage in self._own_stages) else ()
        last: dict[str, Any] = {}
        if any(stage.is_last for stage in self._own_stages):
            last = {"target": labels, "losses": losses}
        # torch's schedule divides all of a gradient by the microbatches, what came before the step, too.
        former = [(one, one.grad) for one in self.parameters() if one.grad is not None]
        for one, _ in former:
            one.grad = None
        self.schedule(rows, tokens).step(
            *first, **last, input_ids=input_ids, labels=labels, **named, return_outputs=False
        )
        self._sum_tied()
        for one, grad in former:
            one.grad = grad if one.grad is None else grad + one.grad
        loss = torch.stack(losses).mean() if losses else torch.zeros((), dtype=torch.float32, device=input_ids.device)
        loss = loss.detach().to(torch.float64 if self._dtype is torch.float64 else torch.float32)
        dist.all_reduce(loss, group=self._mesh.get_group("pp"))
        replicas = self._mesh.get_group("dp")
        if replicas.size() > 1:
            dist.all_reduce(loss, group=replicas)
            loss /= replicas.size()
        return loss

    def _tied_pairs(self) -> list[tuple[nn.Parameter | None, nn.Parameter | None]]:
        """Weights that the first and the last stage share, as this rank's copy of each; it has at most one."""
        first = next((stage for stage in self._own_stages if stage.is_first), None)
        last = next((stage for stage in self._own_stages if stage.is_last), None)
        pairs = [
            (
                None if first is None else first.model.get_parameter(one),
                None if last is None else last.model.get_parameter(other),
            )
            for one, other in self._tied.items()
        ]
        return [pair for pair in pairs if any(one is not None and one.requires_grad for one in pair)]

    def clip_grad_norm_(self, limit: float) -> float:
        """Clips gradients by their norm over all ranks, as torch's function of this name; returns the norm."""
        twice = {id(last) for _, last in self._tied_pairs() if last is not None}
        counted = [parameter for parameter in self.parameters() if id(parameter) not in twice]
        norm = gradient_norm(counted, copies=self._layout.ranks // self._layout.pp)
        clip_gradients(self.parameters(), norm, limit)
        return norm

    def full_state(self, values: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """The whole model's parameters in host memory, by their names; empty on all ranks but the first.

        A collective call of all ranks.

        Args:
            values: other tensors of this rank's parameters by their names, such as states of an optimizer.
        """
        given = dict(self.named_parameters()) if values is None else values
        own = {name: whole_tensor(value) for name, value in given.items()}
        group = self._mesh.get_group("pp")
        found: list[dict[str, torch.Tensor]] | None = [{}] * group.size() if group.rank() == 0 else None
        dist.gather_object(own, found, group=group, group_dst=0)
        if dist.get_rank() or found is None:
            return {}
        return {name: value for part in found for name, value in part.items() if name not in self._tied.values()}

    def _sum_tied(self) -> None:
        """Adds the gradients of the first and the last stage's copies, in place."""
        group, layout = self._mesh.get_group("pp"), self._layout
        ends = [
            next(rank for rank in range(layout.pp) if stage in layout.stages_of(rank))
            for stage in (0, layout.stages - 1)
        ]
        for first, last in self._tied_pairs():
            one = first if first is not None else last
            assert one is not None
            own = _local(one)
            sent, theirs = own.contiguous(), torch.empty_like(own, memory_format=torch.contiguous_format)
            peer = ends[1] if first is not None else ends[0]
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, sent, group=group, group_peer=peer),
                    dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
                ]
            )
            for work in works:
                work.wait()
            own.add_(theirs)


def whole_tensor(value: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor or a tensor, in host memory; a collective call of the ranks that divide it."""
    whole: Any = value.detach()
    return cast("torch.Tensor", (whole.full_tensor() if hasattr(whole, "full_tensor") else whole).cpu())


def _local(parameter: nn.Parameter) -> torch.Tensor:
    grad: Any = parameter.grad
    if grad is None:
        grad = parameter.grad = torch.zeros_like(parameter)
    local: torch.Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
    return local
