"""Setup of a training run on many ranks: this rank's stages, trainer and offload manager."""

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

_T = TypeVar("_T")


def open_trainer(
    config: RunConfig,
    shape: GPTConfig,
    training: TrainConfig,
    batches: BatchSource,
    world: World,
    device: torch.device,
    stack: ExitStack,
    *,
    sparse_embedding: bool = False,
) -> tuple[ParallelTrainer, Manager | None]:
    """Builds this rank's stages, their trainer and their offload manager. A collective call.

    Args:
        config: the run.
        shape: the whole model.
        training: the step loop's numbers, with the precision of this device.
        batches: batches of all ranks together.
        world: the ranks.
        device: this rank's device.
        stack: closes the manager.
        sparse_embedding: exchange the embedding's gradient as rows.

    Returns:
        The trainer and its manager, None without offloading.
    """
    torch.manual_seed(config.seed)
    stages = build_stages(
        shape,
        world,
        seq=config.seq,
        device=device,
        dtype=weight_dtype(training.precision),
        seed=int(torch.randint(1 << 62, ())),  # the number that GPT draws in a single process
        autocast=torch.bfloat16 if training.precision is Precision.BF16_AUTOCAST else None,
        sparse_embedding=sparse_embedding,
    )
    if config.pipeline_dtype is not None:
        for stage in stages:
            stage.passed_dtype = torch.bfloat16
    trainer = ParallelTrainer(
        stages,
        world,
        batches,
        training,
        device=device,
        rows=config.batch,
        seed=config.seed,
        compression=config.compress_gradients,
    )
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


def local_rank_first(call: Callable[[], _T]) -> _T:
    """Result of `call`, made first on one rank of each node, whose cache the others then use. A collective call."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    result = call() if first else None
    dist.barrier()
    return result if result is not None else call()
