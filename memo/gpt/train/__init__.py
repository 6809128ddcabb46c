"""The training run: steps on one or many ranks, cadence, interrupts, metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.gpt.train.adapter import (
        ADAPTATION as ADAPTATION,
        Adapter as Adapter,
        EndedStep as EndedStep,
        LayoutDecision as LayoutDecision,
    )
    from memo.gpt.train.embedding_gradients import rows_seen as rows_seen
    from memo.gpt.train.parallel_step import ParallelTrainer as ParallelTrainer, TiedEmbedding as TiedEmbedding
    from memo.gpt.train.run import train as train
    from memo.gpt.train.step import weight_dtype as weight_dtype
else:
    __getattr__, __dir__, __all__ = attach(__name__)
