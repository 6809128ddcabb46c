"""The list of a step's collectives: literal small cases, and that predicted seconds are its sums."""

from __future__ import annotations

import collections
import dataclasses

import pytest

from memo.gpt import Precision, preset
from memo.gpt.arithmetic import Collective, CollectiveKind, Layout, Ranks, StepCollectives, derive_profile, exchange_s
from memo.gpt.arithmetic.step_collectives import WeightUnit
from memo.mip.inputs import hardware_preset, parse_network

MACHINE = hardware_preset("h100")
MACHINE = dataclasses.replace(MACHINE, network=parse_network("8x400Gb", MACHINE.network))


def of(layout: Layout, **shape: object) -> StepCollectives:
    config = preset("7b", layers=4, **shape)  # type: ignore[arg-type]
    return StepCollectives(config=config, layout=layout)


def test_a_layer_gathers_and_sums_its_tokens_for_attention_and_mlp() -> None:
    step = of(Layout(tokens=8192, gpus=8, tp=8))
    whole = 8192 * 4096 * 2
    assert step.layer_forward() == (
        Collective(kind=CollectiveKind.ALL_GATHER, ranks=Ranks.TENSOR, nbytes=whole, count=2),
        Collective(kind=CollectiveKind.REDUCE_SCATTER, ranks=Ranks.TENSOR, nbytes=whole, count=2),
    )
    # Weights and biases of two norms, biases of two projections.
    assert step.layer_backward()[2] == Collective(
        kind=CollectiveKind.ALL_REDUCE, ranks=Ranks.TENSOR, nbytes=4096 * 2, count=6
    )


def test_ulysses_exchanges_heads_and_a_ring_passes_keys_on() -> None:
    heads, ring = of(Layout(tokens=8192, gpus=4, cp=4)), of(Layout(tokens=9216, gpus=3, cp=3))
    assert {each.nbytes for each in heads.context_forward()} == {8192 // 4 * 4096 * 2}
    assert ring.context_forward() == (
        Collective(kind=CollectiveKind.ROTATE, ranks=Ranks.CONTEXT, nbytes=2 * 9216 // 3 * 4096 * 2, count=2),
    )


def test_weights_are_gathered_before_each_pass_and_the_last_layers_once() -> None:
    step = of(Layout(tokens=8192, gpus=4))
    weights = collections.Counter[str]()
    for each in step.step(microbatches=3):
        if each.ranks is Ranks.REPLICAS:
            weights[each.kind] += each.count
    assert weights == {CollectiveKind.ALL_GATHER: 3 * (2 * 4 - 1) + 3, CollectiveKind.REDUCE_SCATTER: 4 + 1}


def test_rows_that_do_not_divide_are_padded() -> None:
    step = of(Layout(tokens=8192, gpus=4), vocab_size=50257)
    (gathered,) = step.gather(WeightUnit(shapes=((50257, 4096),), shards=4))
    assert gathered.nbytes == 50260 * 4096 * 2


def test_a_pipeline_sends_each_microbatch_and_gathers_once() -> None:
    step = of(Layout(tokens=8192, gpus=4, pp=4))
    sums = [collections.Counter[str]() for _ in range(4)]
    for stage, counts in enumerate(sums):
        for each in step.step(stage=stage, microbatches=8):
            counts[each.kind] += each.count
    assert [counts[CollectiveKind.SEND] for counts in sums] == [8, 16, 16, 8]
    assert [counts[CollectiveKind.RECEIVE] for counts in sums] == [8, 16, 16, 8]


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.BF16_AUTOCAST])
@pytest.mark.parametrize("sizes", [{"tp": 8}, {"tp": 4, "cp": 2}, {"cp": 8}, {}])
def test_predicted_seconds_are_those_of_the_list(sizes: dict[str, int], precision: Precision) -> None:
    """The profile's seconds of one microbatch's collectives, put together, are the price of the whole list."""
    layout = Layout(tokens=65536, gpus=16, **sizes)
    config = preset("7b", layers=4)
    profile = derive_profile(config, MACHINE, layout, precision=precision)
    layer, ends = profile.classes[0], (profile.embedding, profile.head)
    seconds = 4 * (layer.forward_exchange_s + layer.backward_exchange_s + layer.sync_s) + 7 * layer.gather_s
    seconds += sum(end.forward_exchange_s + end.backward_exchange_s + end.sync_s for end in ends)
    listed = StepCollectives(config=config, layout=layout, precision=precision).step()
    listed = [each for each in listed if each.ranks is not Ranks.ALL]  # three numbers, once a step
    assert seconds == pytest.approx(exchange_s(listed, MACHINE, layout), rel=1e-12)
