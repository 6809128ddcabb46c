"""Exposed seconds of overlapped collectives: literal cases, and that halves are the whole."""

from __future__ import annotations

import dataclasses

import pytest

from memo.errors import UsageError
from memo.gpt import preset
from memo.gpt.arithmetic import CollectiveKind, Ranks, StepCollectives, StepLayout, TrainingMethod, derive_profile
from memo.gpt.arithmetic.tensor_overlap import HalfCollectives, HalvedWork, TensorOverlap
from memo.mip.inputs import hardware_preset

H100 = hardware_preset("h100")
WORK = HalvedWork(products=(8.0, 8.0, 8.0, 8.0), attends=(8.0, 16.0), activates=(2.0, 4.0), rest=(0.0, 0.0))


def overlap(gather: float, total: float, *, of_tokens: bool = False) -> TensorOverlap:
    half = HalfCollectives((gather, total), (total, gather), gather)
    return TensorOverlap(work=WORK, half=half, of_tokens=of_tokens)


def test_of_short_collectives_the_first_and_the_last_are_exposed() -> None:
    found = overlap(1.0, 2.0)
    assert found.forward_s == found.backward_s == 1.0 + 2.0
    assert found.again_s == 1.0 + 1.0  # a replay ends before the products that hide the last gather


def test_of_one_sequence_attentions_collectives_are_exposed_too() -> None:
    found = overlap(1.0, 6.0, of_tokens=True)
    assert found.forward_s == 2 * (1.0 + 6.0) + 1.0 + 6.0
    assert found.backward_s == 2 * (1.0 + 6.0 + 1.0) + 1.0 + 6.0
    assert found.again_s == 2 * (1.0 + 6.0) + 1.0


def test_of_long_collectives_what_the_other_half_computes_is_hidden() -> None:
    long = overlap(1000.0, 1000.0)
    assert 7.9e3 < long.forward_s < 8e3
    assert 11.9e3 < long.backward_s < 12e3


def layer(rows: int, tp: int = 4, *, overlap: bool, tokens: int = 8192) -> StepCollectives:
    layout = StepLayout(tokens=tokens, batch=rows, gpus=tp, tp=tp, tp_overlap=overlap)
    return StepCollectives(config=preset("7b"), layout=layout)


@pytest.mark.parametrize(("rows", "sizes"), [(1, [8192, 4096, 4096]), (2, [8192] * 4), (3, [16384, 8192] * 2)])
def test_halves_move_the_bytes_of_the_whole(rows: int, sizes: list[int]) -> None:
    halves, whole = layer(rows, overlap=True), layer(rows, overlap=False)
    for ours, theirs in (
        (halves.layer_forward(), whole.layer_forward()),
        (halves.layer_backward(), whole.layer_backward()),
    ):
        assert sum(each.nbytes * each.count for each in ours) == sum(each.nbytes * each.count for each in theirs)
    gathers = [
        each.nbytes / (4096 * 2)
        for each in halves.tensor_forward()
        for _ in range(each.count)
        if (each.kind, each.ranks) == (CollectiveKind.ALL_GATHER, Ranks.TENSOR)
    ]
    assert sorted(gathers) == sorted(map(float, sizes))


@pytest.mark.parametrize("tokens", [8192, 65536])
def test_a_step_in_halves_is_shorter_by_what_is_hidden_less_what_halving_costs(tokens: int) -> None:
    layout = StepLayout(tokens=tokens, batch=2, gpus=8, tp=8)
    plain, halves = (
        derive_profile(preset("7b"), H100, dataclasses.replace(layout, tp_overlap=each)) for each in (False, True)
    )
    assert (plain.signature.tp_overlap, halves.signature.tp_overlap) == (False, True)
    one, other = plain.layer_profiles()[0], halves.layer_profiles()[0]
    assert other.forward_exchange_s < 0.5 * one.forward_exchange_s
    assert other.forward_s - other.forward_exchange_s > one.forward_s - one.forward_exchange_s
    assert other.forward_s < one.forward_s
    assert other.backward_s < one.backward_s
    assert other.points[-1].recompute_s < one.points[-1].recompute_s
    assert [point.saved_bytes for point in other.points] == [point.saved_bytes for point in one.points]


def test_what_has_no_halves_is_refused_with_what_has() -> None:
    with pytest.raises(UsageError, match="use --batch 2 or --seq 16"):
        derive_profile(preset("7b"), H100, StepLayout(tokens=8, gpus=8, tp=8, tp_overlap=True))
    with pytest.raises(UsageError, match="leave it out with --lora"):
        derive_profile(
            preset("7b"), H100, StepLayout(tokens=8192, gpus=8, tp=8, tp_overlap=True), TrainingMethod(lora=8)
        )
