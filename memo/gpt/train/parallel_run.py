"""The parts of a training run that are different on many ranks: what each of them opens, and in which order."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from memo.gpt.config import GPTConfig
from memo.gpt.model.build_rank import build_stages
from memo.gpt.run_config import RunConfig
from memo.gpt.train.offload_arguments import open_manager
from memo.gpt.train.parallel_step import ParallelTrainer
from memo.gpt.train.step import BatchSource, weight_dtype
from memo.gpt.train_config import Precision, TrainConfig
from memo.manager import Manager
from memo.parallel import World

__all__ = ["local_rank_first", "open_trainer"]

_T = TypeVar("_T")


def open_trainer(
    config: RunConfig,
    shape: GPTConfig,
    training: TrainConfig,
    batches: BatchSource,
    world: World,
    device: torch.device,
    stack: ExitStack,
) -> tuple[ParallelTrainer, Manager | None]:
    """This rank's stages, their offload manager, and what steps them. A collective call."""
    torch.manual_seed(config.seed)
    stages = build_stages(
        shape,
        world,
        seq=config.seq,
        device=device,
        dtype=weight_dtype(training.precision),
        seed=int(torch.randint(1 << 62, ())),  # as GPT draws it in a single process
        autocast=torch.bfloat16 if training.precision is Precision.BF16_AUTOCAST else None,
    )
    trainer = ParallelTrainer(stages, world, batches, training, device=device, rows=config.batch, seed=config.seed)
    manager = open_manager(
        config.offload,
        nn.ModuleList(stages),
        device,
        layers=[layer for stage in stages for layer in stage.layers.values()],
        group=world.layer_ranks.get_group(),
        schedule=trainer.schedule,
    )
    if manager is not None:
        stack.enter_context(closing(manager))
        trainer.around_forward = manager
    return trainer, manager


def local_rank_first(open_it: Callable[[], _T]) -> _T:
    """One rank of each node opens first, so that what it caches is there for the others. A collective call."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    opened = open_it() if first else None
    dist.barrier()
    return opened if opened is not None else open_it()
