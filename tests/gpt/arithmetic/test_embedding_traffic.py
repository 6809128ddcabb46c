"""Dense against sparse exchange of an embedding's gradient: where they meet, by hand, and both in a profile."""

from __future__ import annotations

import dataclasses

import pytest

from memo.errors import UsageError
from memo.gpt import EmbeddingGradients, preset
from memo.gpt.arithmetic import EmbeddingTraffic, StepLayout, TrainingMethod, derive_profile, reason_not_sparse
from memo.mip.inputs import Profile, hardware_preset

ROWS = TrainingMethod(embedding=EmbeddingGradients.SPARSE)
MACHINE = hardware_preset("h100")
LLAMA = preset("llama3-8b")


def traffic(**changes: int) -> EmbeddingTraffic:
    sizes = {"rows": 50_000, "width": 1024, "tokens": 4096, "ranks": 8, "element": 4, "gathered_element": 4}
    return EmbeddingTraffic(**(sizes | changes))


def test_bytes_are_those_of_a_hand_count() -> None:
    known = traffic()
    assert known.dense_bytes == 7 * 50_000 * 1024 * 4 * 2 // 8
    assert known.sparse_bytes == 7 * (8 + 4096 * (4 + 1024 * 4))
    assert known.sparse_bytes_of(100) == 7 * (8 + 100 * (4 + 4096))


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_they_meet_at_a_density_of_two_over_the_ranks(ranks: int) -> None:
    """But for the numbers of the rows, a thousandth here, and whole rows."""
    at = 2 * 50_000 // ranks
    assert traffic(ranks=ranks, tokens=at - at // 900 - 1).sparse_is_less
    assert not traffic(ranks=ranks, tokens=at + 1).sparse_is_less


def test_long_sequences_touch_every_row_and_are_dense_from_three_ranks_on() -> None:
    assert traffic(tokens=1 << 20).distinct == 50_000
    assert not traffic(tokens=1 << 20, ranks=3).sparse_is_less


@pytest.mark.parametrize(("smaller", "larger"), [({"rows": 60_000}, {}), ({}, {"ranks": 16}), ({}, {"tokens": 8192})])
def test_more_rows_favour_sparse_more_ranks_and_tokens_dense(smaller: dict[str, int], larger: dict[str, int]) -> None:
    one, other = traffic(**smaller), traffic(**larger)
    assert one.sparse_bytes / one.dense_bytes < other.sparse_bytes / other.dense_bytes


def test_a_table_that_every_rank_has_is_reduced_and_the_parts_gathered_in_the_gradients_format() -> None:
    assert traffic(gathered_element=0, element=2).dense_bytes == 2 * 7 * 50_000 * 1024 * 2 // 8


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ({"tied": True, "ranks": 8}, "output projection"),
        ({"tied": False, "ranks": 1}, "no other rank"),
        ({"tied": False, "ranks": 8, "zero": 2}, "ZeRO 2"),
        ({"tied": False, "ranks": 8, "lora": 4}, "adapters"),
    ],
    ids=lambda case: str(case)[:20],
)
def test_where_rows_cannot_be_exchanged_the_reason_is_said(case: dict[str, int], word: str) -> None:
    assert word in str(reason_not_sparse(**case))  # type: ignore[arg-type]


def test_an_untied_table_of_several_ranks_can_be() -> None:
    assert reason_not_sparse(tied=False, ranks=2) is None
    assert reason_not_sparse(tied=False, ranks=2, zero=0) is None


def derived(tokens: int, *, sparse: bool, **sizes: int) -> Profile:
    layout = {"gpus": 8} | {name: size for name, size in sizes.items() if name in ("gpus", "tp", "cp", "pp")}
    others = {name: size for name, size in sizes.items() if name not in layout}
    return derive_profile(
        LLAMA, MACHINE, StepLayout(tokens=tokens, **layout), ROWS if sparse else TrainingMethod(), **others
    )  # type: ignore[arg-type]


def test_a_profile_of_rows_gathers_no_table_has_it_whole_and_updates_all_of_it() -> None:
    dense, sparse = (derived(2048, sparse=way) for way in (False, True))
    figures = sparse.embedding_exchange
    assert figures is not None
    assert dense.embedding_exchange == dataclasses.replace(figures, sparse=False)
    table = 128_256 * 4096
    # Weight, gradient and two moments in bf16, of which the dense exchange has an eighth, and weight and gradient whole.
    assert sparse.embedding.static_bytes == 8 * table
    assert (
        figures.resident_bytes
        == 8 * table - (table + 4 * table)
        == sparse.embedding.static_bytes - (dense.embedding.static_bytes)
    )
    rate = MACHINE.nvlink_bytes_per_s * MACHINE.network.node_efficiency
    gathered_s = 2 * 7 * 1.9e-6 + 20e-6 + 2 * (7 / 8) * 2 * table / rate
    assert figures.dense_s == pytest.approx(gathered_s)
    # Without a pipeline the head and its norm are gathered, and reduced, together with the table.
    less_s = dense.embedding.forward_exchange_s - sparse.embedding.forward_exchange_s
    assert less_s == pytest.approx(7 / 8 * 2 * table / rate)
    rows_s = 3 * (7 * 1.9e-6 + 10e-6) + 7 * (8 + 2048 * (4 + 2 * 4096)) / rate
    rows_s += (2 * table + 3 * 8 * 2048 * 2 * 4096) / MACHINE.hbm_bytes_per_s
    update_s = 14 * table * 7 / 8 / MACHINE.hbm_bytes_per_s
    assert figures.sparse_s == pytest.approx(rows_s + update_s)
    assert sparse.optimizer_s - dense.optimizer_s == pytest.approx(update_s)
    head_s = 7 * 1.9e-6 + 10e-6 + 7 / 8 * 2 * (table + 4096) / rate
    assert sparse.embedding.sync_s == pytest.approx(rows_s + head_s)


def test_the_faster_exchange_changes_with_the_length() -> None:
    short, long = (derived(tokens, sparse=False).embedding_exchange for tokens in (2048, 65_536))
    assert short is not None
    assert long is not None
    assert short.sparse_s < short.dense_s
    assert long.sparse_s > long.dense_s


def test_in_a_pipeline_the_table_is_gathered_once_a_step_and_no_longer_counted_there() -> None:
    dense, sparse = (derived(2048, sparse=way, pp=2, accumulate=4) for way in (False, True))
    rate = MACHINE.nvlink_bytes_per_s * MACHINE.network.node_efficiency
    less_s = 3 / 4 * 2 * 128_256 * 4096 / rate
    assert dense.optimizer_exchange_s - sparse.optimizer_exchange_s == pytest.approx(less_s)


def test_microbatches_gather_the_dense_table_again_and_see_more_rows() -> None:
    one, four = (derived(2048, sparse=False, accumulate=count).embedding_exchange for count in (1, 4))
    assert one is not None
    assert four is not None
    assert four.dense_bytes - one.dense_bytes == 3 * 7 * 128_256 * 4096 * 2 // 8
    assert four.sparse_bytes == 7 * (8 + 4 * 2048 * (4 + 2 * 4096))


def test_all_is_as_before_where_rows_cannot_be_exchanged() -> None:
    tied = dataclasses.replace(LLAMA, tie_embeddings=True)
    assert derive_profile(tied, MACHINE, StepLayout(tokens=2048, gpus=8)).embedding_exchange is None
    with pytest.raises(
        UsageError, match="output projection, too, whose gradient has every row; use --embedding-exchange"
    ):
        derive_profile(tied, MACHINE, StepLayout(tokens=2048, gpus=8), ROWS)
