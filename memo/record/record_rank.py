"""One rank's step of our GPT under tensor and context parallelism, to be recorded without the other ranks.

Owns what such a step is made of; the group, in which nobody else is, is memo.parallel.solo_rank's. Parameters that would be
sharded over replicas are whole, as they are while they are used. It stands apart from memo.record.recording, since
importing it takes as long as recording a step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from memo.gpt import GPTConfig, Precision
from memo.gpt.model import divided_stages
from memo.gpt.train import weight_dtype
from memo.parallel import World
from memo.record.recording import Step

__all__ = ["rank_step"]


def rank_step(
    config: GPTConfig, world: World, *, batch: int, tokens: int, precision: Precision = Precision.BF16
) -> Callable[[], Step]:
    """What makes the step of a rank whose layout has one pipeline stage; called where tensors are to be hollow."""
    autocast = torch.bfloat16 if precision is Precision.BF16_AUTOCAST else None
    # Not under a mode that takes contents away: a mesh looks into its tensors to find its place.
    (stage,) = divided_stages(config, world, seq=tokens, dtype=weight_dtype(precision), autocast=autocast)

    def build() -> Step:
        stage.to_empty(device="cpu")
        ids = torch.zeros(batch, len(stage.own), dtype=torch.int64)
        targets = torch.zeros_like(ids)
        return Step(
            model=stage,
            loss=lambda: stage(ids, targets),
            inputs=(ids, targets),
            layers=tuple(stage.layers.values()),
        )

    return build
