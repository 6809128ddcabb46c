"""One rank's step of memo's GPT under tensor and context parallelism, for recording without the other ranks.

Owns how the step is built; memo.parallel.solo_rank simulates the process group. Parameters that data parallelism would
shard are whole, as they are while in use. Separate from memo.record.recording, since importing this module takes as
long as recording a step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from memo.gpt import GPTConfig, Precision
from memo.gpt.model import divided_stages
from memo.gpt.train import weight_dtype
from memo.parallel import World
from memo.record.step import Step


def rank_step(
    config: GPTConfig, world: World, *, batch: int, tokens: int, precision: Precision = Precision.BF16
) -> Callable[[], Step]:
    """Returns a callable that builds one rank's step, for `record_step`; it is called with every tensor byteless.

    Args:
        config: the model.
        world: the rank's place in the layout, which has one pipeline stage.
        batch: sequences of the microbatch.
        tokens: tokens of each sequence, over all ranks.
        precision: dtypes of weights and computation.
    """
    autocast = torch.bfloat16 if precision is Precision.BF16_AUTOCAST else None
    # Built outside of the byteless mode: a device mesh reads its tensors to find the rank's place.
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
