"""One rank's step, recorded without the others: its bytes by arithmetic, its allocations those of real tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from memo.gpt import GPTConfig, Precision, preset
from memo.gpt.arithmetic.flops import layer_parameter_count
from memo.parallel import Layout, simulated_rank
from memo.record import Recording, SavedRole, rank_step, record_step

BATCH, TOKENS, HIDDEN, HEADS, LAYERS = 2, 256, 128, 16, 2
ITEM = 2  # of a bfloat16


def shape(**others: Any) -> GPTConfig:
    sizes = {"vocab_size": 64, "layers": LAYERS, "hidden": HIDDEN, "heads": HEADS} | others
    return preset("tiny", **sizes)


def recorded(
    layout: Layout, config: GPTConfig | None = None, *, precision: Precision = Precision.BF16, **options: Any
) -> Recording:
    config = config or shape()
    with simulated_rank(layout) as world:
        step = rank_step(config, world, batch=BATCH, tokens=TOKENS, precision=precision)
        return record_step(step, exact=True, **options)


def test_a_tensor_parallel_rank_saves_its_share_of_sixteen_units() -> None:
    saved = recorded(Layout(tp=8)).saved_nbytes
    unit = LAYERS * BATCH * TOKENS * HIDDEN * ITEM // 8
    assert saved[SavedRole.INPUT] == saved[SavedRole.ATTENTION] == unit
    assert saved[SavedRole.RECOMPUTABLE] == 14 * unit
    norms, softmax = 2 * 2 * ITEM, 4 * HEADS  # bytes a token: mean and deviation of two norms, a logarithm a head
    assert saved[SavedRole.STATISTICS] == LAYERS * BATCH * TOKENS * (norms + softmax) // 8


def test_without_sequence_parallelism_what_lies_between_the_matrices_is_whole() -> None:
    saved = recorded(Layout(tp=8, sequence_parallel=False)).saved_nbytes
    unit = LAYERS * BATCH * TOKENS * HIDDEN * ITEM
    assert saved[SavedRole.INPUT] == unit
    assert saved[SavedRole.ATTENTION] == unit // 8
    assert saved[SavedRole.RECOMPUTABLE] == 3 * unit + 11 * unit // 8  # both norms' results and the residual; the rest


def test_context_parallelism_keeps_attentions_result_before_and_after_the_exchange() -> None:
    saved = recorded(Layout(tp=2, cp=4)).saved_nbytes
    unit = LAYERS * BATCH * TOKENS * HIDDEN * ITEM // 8
    assert saved[SavedRole.INPUT] == saved[SavedRole.ATTENTION] == unit
    assert saved[SavedRole.RECOMPUTABLE] == 15 * unit


def test_parameters_are_counted_as_the_rank_has_them() -> None:
    config = shape(vocab_size=512)
    one, eight = (recorded(Layout(tp=tp, cp=8 // tp), config).static_nbytes for tp in (1, 8))
    # Norms, and the biases behind the two sums, are on every rank.
    whole = LAYERS * (4 * HIDDEN + 2 * HIDDEN)
    divided = LAYERS * layer_parameter_count(config) - whole + config.vocab_size * HIDDEN
    assert one - eight == ITEM * divided * 7 // 8


@pytest.mark.parametrize("layout", [Layout(tp=4), Layout(tp=2, cp=2), Layout(tp=4, sequence_parallel=False)], ids=str)
@pytest.mark.parametrize("options", [{}, {"optimizer": "adamw"}, {"checkpointed": True}], ids=str)
def test_the_trace_is_that_of_real_tensors(layout: Layout, options: dict[str, bool]) -> None:
    byteless, real = (recorded(layout, real=real, **options) for real in (False, True))
    assert len(byteless.trace.allocations) > 100
    assert byteless == real


def test_under_offload_the_rank_moves_what_it_saves() -> None:
    """All but the last layer's; the fused norm statistics of a few KiB stay."""
    moved = recorded(Layout(tp=2), shape(layers=3, hidden=512), alpha=1.0).moved_nbytes
    assert moved == 2 * 16 * BATCH * TOKENS * 512 * ITEM // 2


def test_the_group_is_gone_afterwards() -> None:
    def fail() -> None:
        with simulated_rank(Layout(tp=2)):
            assert dist.is_initialized()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not dist.is_initialized()
