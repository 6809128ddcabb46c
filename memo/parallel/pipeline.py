"""Pipeline parallelism: a rank's stages under one of torch's schedules.

Stages are given the shapes that pass between them, so no schedule runs a forward to infer them, which would save
activations of no step.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from memo.errors import UsageError
from memo.parallel.layout import Layout, PipelineSchedule
from memo.torch_private import found, place

# 2.11 is known to fail: its split backward needs attributes that nodes of Python functions lack.
_SPLITS_SINCE = "2.13"
_TORCHS_GATHERED = 3

TORCH_NAMES = {
    PipelineSchedule.GPIPE: "GPipe",
    PipelineSchedule.ONE_F_ONE_B: "1F1B",
    PipelineSchedule.INTERLEAVED: "Interleaved1F1B",
    PipelineSchedule.ZERO_BUBBLE: "InterleavedZeroBubble",
    PipelineSchedule.ZERO_BUBBLE_V: "ZBVZeroBubble",
}


def make_schedule(
    layout: Layout,
    modules: Mapping[int, nn.Module],
    group: dist.ProcessGroup,
    *,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    microbatches: int,
    device: torch.device,
) -> Any:
    """Makes torch's schedule over this rank's stages.

    Args:
        layout: with `pp` and the schedule.
        modules: stage index -> module. The last stage's module returns the loss itself, since its weights may be sharded
            outside its forward.
        group: of the pipeline.
        tokens: example of a microbatch at the first stage, (rows, tokens) int64, on the meta device.
        hidden: example of a microbatch between stages, (rows, tokens, h), on the meta device.
        microbatches: of a step.
        device: of the stages.

    Raises:
        UsageError: the schedule splits backward in two, and torch is too old for it.
    """
    check_torch(layout.schedule)
    loss = torch.empty((), dtype=torch.promote_types(hidden.dtype, torch.float32), device="meta")
    stages = [
        _Stage(
            module,
            index,
            layout.stages,
            device,
            input_args=(tokens if index == 0 else hidden,),
            output_args=(loss if index == layout.stages - 1 else hidden,),
            group=group,
        )
        for index, module in modules.items()
    ]
    kind: Any = get_schedule_class(TORCH_NAMES[layout.schedule])
    with _gathered_all_step(layout.stages_per_rank):
        return kind(stages if layout.stages_per_rank > 1 else stages[0], microbatches, loss_fn=_given, scale_grads=True)


@contextlib.contextmanager
def _gathered_all_step(stages: int) -> Iterator[None]:
    """Has schedules that are made in the block keep a rank's stages gathered through a step; torch's keep three."""
    owner, name = place("add_unshard_reshard")
    torchs = found("add_unshard_reshard")
    setattr(owner, name, functools.partial(torchs, max_active_stages=max(stages, _TORCHS_GATHERED)))
    try:
        yield
    finally:
        setattr(owner, name, torchs)


class _Stage(PipelineStage):
    """torch's stage, which frees in time what torch keeps until the next step or beyond.

    Gradients of inputs where backward is split; there also the result, which only the pipeline's first stage needs in the
    second half; and what chunks of one rank pass on to one another, for which torch has a buffer for each microbatch.
    """

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *arguments, **options)
        if bwd_chunk_id in self.backward_state and not self.is_first:
            inputs, groups, *_ = self.backward_state[bwd_chunk_id]
            self.backward_state[bwd_chunk_id] = inputs, groups, None, None
        for received in self.args_recv_info[bwd_chunk_id]:
            buffer = getattr(received, "buffer", None)  # none for the first stage's tokens
            if buffer is not None:
                buffer.grad = None
        self._drop_buffers_of_own_rank(self.args_recv_info[bwd_chunk_id], self.grad_recv_info.get(bwd_chunk_id, ()))

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        self._drop_buffers_of_own_rank(*self.args_recv_info.values())

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        self._drop_buffers_of_own_rank(*self.grad_recv_info.values())

    def _drop_buffers_of_own_rank(self, *received: Sequence[Any]) -> None:
        for one in itertools.chain.from_iterable(received):
            source = getattr(one, "source", None)  # older torch has placeholders for the first stage's tokens
            if source is not None and self.stage_index_to_group_rank.get(source) == self.group_rank:
                one.buffer = None


def check_torch(schedule: PipelineSchedule) -> None:
    """Raises UsageError where this torch cannot run the schedule."""
    if schedule.splits_backward and torch.__version__ < _SPLITS_SINCE:
        raise UsageError(
            f"--schedule {schedule} needs torch {_SPLITS_SINCE}; {torch.__version__} cannot split a backward that goes "
            f"through functions written in Python; use interleaved-1f1b"
        )


def pass_through(
    layout: Layout,
    modules: Mapping[int, nn.Module],
    group: dist.ProcessGroup,
    tokens: torch.Tensor,
    *,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    rows: torch.Tensor | None,
) -> torch.Tensor | None:
    """Forward of one batch through all stages, outside of any schedule; for evaluation.

    A rank waits only for its own input, so consecutive calls fill the pipeline. torch's schedules have an `eval`, but for
    exactly the microbatches of a step.

    Args:
        layout: with `pp` and the schedule.
        modules: stage index -> module, of this rank.
        group: of the pipeline.
        tokens: (rows, tokens), int64.
        hidden: example of the tensor between stages, (rows, tokens, h).
        targets: (rows, tokens), int64, for the last stage.
        rows: passed to every stage.

    Returns:
        The loss on the rank of the last stage, None on the others.
    """
    rank_of = {stage: rank for rank in range(layout.pp) for stage in layout.stages_of(rank)}
    x, last = tokens, layout.stages - 1
    for index, module in modules.items():
        if index and rank_of[index - 1] != group.rank():
            x = torch.empty_like(hidden, device=tokens.device, requires_grad=False)
            dist.recv(x, group=group, group_src=rank_of[index - 1])
        x = module(x, targets if index == last else None, rows)
        if index < last and rank_of[index + 1] != group.rank():
            dist.send(x.contiguous(), group=group, group_dst=rank_of[index + 1])
    return x if last in modules else None


def _given(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output
