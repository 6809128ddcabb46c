"""What another layout reads of a checkpoint, by hand; tests/parallel/test_resharding.py has what ranks really read."""

from __future__ import annotations

import pytest

from memo.errors import UsageError
from memo.gpt import GPTConfig, Variant, preset
from memo.gpt.arithmetic import parameter_count
from memo.gpt.checkpoint import Resharding, reshard
from memo.gpt.checkpoint.resharding import _parameters
from memo.gpt.model import GPT
from memo.parallel import Layout, PipelineSchedule

LLAMA = preset("7b", variant="llama")
STATE = 3 * 4
"""Bytes of a float32 parameter with its moments."""


def counters(config: GPTConfig) -> int:
    return 4 * len(list(GPT(config, device="meta").parameters()))


@pytest.mark.parametrize("variant", ["gpt", "llama"])
def test_names_and_shapes_are_the_models(variant: Variant) -> None:
    config = preset("125m", variant=variant)
    found = {name: tuple(value.shape) for name, value in GPT(config, device="meta").named_parameters()}
    known = {}
    for parameter in _parameters(config):
        layers = range(config.layers) if parameter.of_layer else (None,)
        known |= {
            parameter.name if index is None else f"layers.{index}.{parameter.name}": parameter.shape for index in layers
        }
    assert known == found


def test_one_rank_reads_everything_once_and_as_many_ranks_as_before_their_own() -> None:
    whole = STATE * parameter_count(LLAMA) + counters(LLAMA)
    alone = reshard(LLAMA, Layout(dp=4, tp=2), Layout(), element=4)
    assert alone.read_bytes == alone.own_bytes == (whole,)
    same = reshard(LLAMA, Layout(dp=4, tp=2), Layout(dp=4, tp=2), element=4)
    assert same.read_bytes == same.own_bytes
    assert sum(same.own_bytes) - whole == 7 * counters(LLAMA) + STATE * 65 * 4096, "each norm on both of a pair"


def test_three_ranks_read_two_or_three_of_four_parts() -> None:
    """Rows 0..3 of 12 and so on at four ranks; 0..4 at three, which meet parts 0 and 1, 1 and 2, 2 and 3."""
    flat = GPTConfig(vocab_size=12, hidden=12, layers=1, heads=1, kv_heads=1, ffn=12, max_seq=12, bias=False)
    four, three = Layout(dp=4), Layout(dp=3)
    known = reshard(flat, four, three, element=4)
    rows = [(shape[0], shape[1] if len(shape) > 1 else 1) for shape in (p.shape for p in _parameters(flat))]
    elements = sum(height * width for height, width in rows)
    assert known.own_bytes == (STATE * elements // 3 + counters(flat),) * 3
    assert known.read_bytes == (STATE * elements // 2 + counters(flat),) * 3


def test_a_whole_embedding_is_one_part() -> None:
    dense, sparse = (
        reshard(LLAMA, Layout(dp=4), Layout(dp=4), element=4, sparse_embedding=(was, is_))
        for was, is_ in ((False, False), (True, False))
    )
    table = STATE * LLAMA.vocab_size * LLAMA.hidden
    assert dense.own_bytes == sparse.own_bytes
    assert sum(sparse.read_bytes) - sum(dense.read_bytes) == 3 * table


def test_element_scales_all_but_the_counters_of_steps() -> None:
    four, two = (reshard(LLAMA, Layout(dp=2), Layout(pp=2), element=element) for element in (4, 2))
    count = counters(LLAMA) // 4
    assert sum(four.read_bytes) - 4 * count == 2 * (sum(two.read_bytes) - 4 * count)


def of_bytes(*read: int) -> Resharding:
    return Resharding(old=Layout(dp=2), new=Layout(dp=len(read)), own_bytes=read, read_bytes=read)


def test_seconds_are_those_of_the_node_that_reads_most_or_of_all_over_what_they_share() -> None:
    known = of_bytes(10, 20, 30, 50, 5)
    assert known.seconds(ranks_per_node=1, node_bytes_per_s=10) == 5
    assert known.seconds(ranks_per_node=2, node_bytes_per_s=10) == 8
    assert known.seconds(ranks_per_node=2, node_bytes_per_s=10, shared_bytes_per_s=5) == 23
    for wrong in ({"ranks_per_node": 0, "node_bytes_per_s": 1.0}, {"ranks_per_node": 1, "node_bytes_per_s": 0.0}):
        with pytest.raises(UsageError, match="above 0, not 0"):
            known.seconds(**wrong)  # type: ignore[arg-type]


def test_the_row_says_layouts_bytes_and_time() -> None:
    layouts = Layout(dp=2, tp=2), Layout(pp=2)
    known = Resharding(old=layouts[0], new=layouts[1], own_bytes=(1 << 30, 1 << 30), read_bytes=(1 << 30, 3 << 29))
    assert known.row(ranks_per_node=8, node_bytes_per_s=2.5e9) == (
        "resharding: dp 2, tp 2 to pp 2: a rank reads at most 1.5 GiB of the checkpoint, for its 1 GiB; all 2.5 GiB, 1.07 s "
        "at 2.5 GB/s a node"
    )
    assert (
        of_bytes(5, 5).row(ranks_per_node=8, node_bytes_per_s=0)
        == "resharding: dp 2 to dp 2: a rank reads at most 5 B of the checkpoint, its own; all 10 B"
    )


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(tp=3), "--tp 3 does not divide the model's 32 heads"),
        (Layout(pp=5), "32 layers do not divide over 5 pipeline stages"),
        (Layout(tp=64), "--tp 64 does not divide"),
    ],
    ids=str,
)
def test_a_layout_that_does_not_divide_the_model_is_refused_in_a_line(layout: Layout, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        reshard(LLAMA, Layout(dp=2), layout, element=4)


@pytest.mark.parametrize("schedule", list(PipelineSchedule))
def test_every_schedule_has_its_stages(schedule: PipelineSchedule) -> None:
    known = reshard(LLAMA, Layout(dp=4), Layout(pp=4, schedule=schedule), element=4)
    assert sum(known.own_bytes) == STATE * parameter_count(LLAMA) + counters(LLAMA)


def test_a_thousand_ranks_are_counted() -> None:
    big = preset("530b")
    known = reshard(big, Layout(dp=8, tp=8, pp=35), Layout(dp=16, tp=8, pp=15), element=2)
    assert len(known.read_bytes) == 1920
    assert all(read >= own for read, own in zip(known.read_bytes, known.own_bytes, strict=True))


def test_uneven_stages_have_their_own_layers() -> None:
    even, uneven = Layout(pp=2), Layout(pp=2, stage_layers=(20, 12))
    known, other = (reshard(LLAMA, Layout(dp=2), layout, element=4) for layout in (even, uneven))
    layer = (known.own_bytes[0] - STATE * LLAMA.vocab_size * LLAMA.hidden - 4) // 16
    assert other.own_bytes == (known.own_bytes[0] + 4 * layer, known.own_bytes[1] - 4 * layer)
