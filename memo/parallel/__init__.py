"""Parallel training: layouts of ranks, differentiable collectives, tensor and context parallelism, pipelines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.parallel.collectives import (
        all_gathered as all_gathered,
        exchange_rows as exchange_rows,
        reduce_scattered as reduce_scattered,
    )
    from memo.parallel.failure import ended_by_signal as ended_by_signal, first_cause as first_cause
    from memo.parallel.gathered_input import is_wanted as is_wanted, kept_for as kept_for
    from memo.parallel.grad_norm import clip_gradients as clip_gradients, gradient_norm as gradient_norm
    from memo.parallel.layout import (
        ContextAttention as ContextAttention,
        Layout as Layout,
        PipelineSchedule as PipelineSchedule,
        key_copies as key_copies,
        parse_layer_counts as parse_layer_counts,
    )
    from memo.parallel.pipeline import (
        check_torch as check_torch,
        make_schedule as make_schedule,
        pass_through as pass_through,
    )
    from memo.parallel.pipeline_order import PipelineOrder as PipelineOrder
    from memo.parallel.rank_agreement import gather_values as gather_values
    from memo.parallel.ring_attention import Ring as Ring
    from memo.parallel.sequence_shards import SequenceShards as SequenceShards
    from memo.parallel.solo_rank import fake_group as fake_group, simulated_rank as simulated_rank
    from memo.parallel.store import RESTARTS as RESTARTS
    from memo.parallel.tensor_parallel import (
        ColumnParallel as ColumnParallel,
        Entry as Entry,
        Replicated as Replicated,
        RowParallel as RowParallel,
        begin_entry as begin_entry,
        begin_row_sum as begin_row_sum,
        divide_experts as divide_experts,
        own_experts as own_experts,
        own_parts as own_parts,
        parameters_once as parameters_once,
        row_sum as row_sum,
    )
    from memo.parallel.tensor_parallel_group import group_of as group_of
    from memo.parallel.ulysses import Ulysses as Ulysses
    from memo.parallel.vocabulary_parallel import (
        DividedRows as DividedRows,
        VocabularyParallel as VocabularyParallel,
        own_rows as own_rows,
    )
    from memo.parallel.world import World as World, join as join
else:
    __getattr__, __dir__, __all__ = attach(__name__)
