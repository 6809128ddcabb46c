"""The list of a step's collectives: literal small cases, and that predicted seconds are its sums."""

from __future__ import annotations

import collections
import dataclasses

import pytest

from memo.gpt import MoeConfig, Precision, preset
from memo.gpt.arithmetic import (
    Collective,
    CollectiveKind,
    Ranks,
    StepCollectives,
    StepLayout,
    derive_profile,
    exchange_s,
)
from memo.gpt.arithmetic.step_collectives import WeightUnit
from memo.mip.inputs import hardware_preset, parse_network

MACHINE = hardware_preset("h100")
MACHINE = dataclasses.replace(MACHINE, network=parse_network("8x400Gb", MACHINE.network))


def of(layout: StepLayout, **shape: object) -> StepCollectives:
    config = preset("7b", layers=4, **shape)  # type: ignore[arg-type]
    return StepCollectives(config=config, layout=layout)


def test_a_layer_gathers_and_sums_its_tokens_for_attention_and_mlp() -> None:
    step = of(StepLayout(tokens=8192, gpus=8, tp=8))
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
    heads, ring = of(StepLayout(tokens=8192, gpus=4, cp=4)), of(StepLayout(tokens=9216, gpus=3, cp=3))
    assert {each.nbytes for each in heads.context_forward()} == {8192 // 4 * 4096 * 2}
    assert ring.context_forward() == (
        Collective(kind=CollectiveKind.ROTATE, ranks=Ranks.CONTEXT, nbytes=2 * 9216 // 3 * 4096 * 2, count=2),
    )


def test_ranks_that_share_a_key_value_head_get_a_copy_each() -> None:
    queries, keys = of(StepLayout(tokens=8192, gpus=32, tp=2, cp=16), kv_heads=8).context_forward()
    each = 8192 // 16 * 128 * 2  # of a head, on a rank
    assert (queries.nbytes, keys.nbytes) == (16 * each, 16 * each)
    # Three query heads a rank, of groups of two.
    astride = of(StepLayout(tokens=8192, gpus=4, cp=4), hidden=1536, heads=12, kv_heads=6).context_forward()
    assert [one.nbytes for one in astride] == [12 * 4 * each] * 2


def test_weights_are_gathered_before_each_pass_and_the_last_layers_once() -> None:
    step = of(StepLayout(tokens=8192, gpus=4))
    weights = collections.Counter[str]()
    for each in step.step(microbatches=3):
        if each.ranks is Ranks.REPLICAS:
            weights[each.kind] += each.count
    assert weights == {CollectiveKind.ALL_GATHER: 3 * (2 * 4 - 1) + 3, CollectiveKind.REDUCE_SCATTER: 4 + 1}


def test_rows_that_do_not_divide_are_padded() -> None:
    step = of(StepLayout(tokens=8192, gpus=4), vocab_size=50257)
    (gathered,) = step.gather(WeightUnit(shapes=((50257, 4096),), shards=4))
    assert gathered.nbytes == 50260 * 4096 * 2


def test_a_pipeline_sends_each_microbatch_and_gathers_once() -> None:
    step = of(StepLayout(tokens=8192, gpus=4, pp=4))
    sums = [collections.Counter[str]() for _ in range(4)]
    for stage, counts in enumerate(sums):
        for each in step.step(stage=stage, microbatches=8):
            counts[each.kind] += each.count
    assert [counts[CollectiveKind.SEND] for counts in sums] == [8, 16, 16, 8]
    assert [counts[CollectiveKind.RECEIVE] for counts in sums] == [8, 16, 16, 8]


MOE = MoeConfig(experts=8, top_k=2, shared_experts=1, expert_hidden=4096, every=2)


def test_experts_exchange_the_rows_of_a_ranks_tokens() -> None:
    step = of(StepLayout(tokens=8192, gpus=8, tp=2, ep=4), moe=MOE)
    rows = 8192 // 2 * 2 * 4096 * 2
    assert step.expert_forward() == (
        Collective(kind=CollectiveKind.ALL_REDUCE, ranks=Ranks.TOKENS, nbytes=8 * 8),
        Collective(kind=CollectiveKind.ALL_REDUCE, ranks=Ranks.TENSOR, nbytes=4),
        Collective(kind=CollectiveKind.ALL_TO_ALL, ranks=Ranks.EXPERTS, nbytes=8 * 8),
        Collective(kind=CollectiveKind.ALL_TO_ALL, ranks=Ranks.EXPERTS, nbytes=rows, count=2),
    )
    narrow = of(StepLayout(tokens=8192, gpus=8, tp=2, ep=4), moe=dataclasses.replace(MOE, bottleneck=1024))
    assert narrow.expert_backward()[0].nbytes == rows / 4


def test_experts_are_sharded_over_the_ranks_with_the_same_ones() -> None:
    own, router, experts = of(StepLayout(tokens=8192, gpus=16, tp=2, ep=2), moe=MOE).layer_units(experts=True)
    assert (own.ranks, own.shards) == (Ranks.REPLICAS, 8)
    assert (router.ranks, router.shards, router.shapes) == (Ranks.TOKENS, 16, ((8, 4096),))
    # Four experts on a rank for eight ranks with the same ones: sharded by their inputs.
    assert (experts.ranks, experts.shards) == (Ranks.EXPERT_COPIES, 8)
    assert experts.shapes == ((4096, 4 * 4096), (4096, 4 * 4096))


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.BF16_AUTOCAST])
@pytest.mark.parametrize(
    "sizes",
    [{"tp": 8}, {"tp": 4, "cp": 2}, {"cp": 8}, {}, {"ep": 8}, {"ep": 4, "tp": 2, "cp": 2}],
    ids=lambda sizes: "-".join(f"{name}{size}" for name, size in sizes.items()),
)
def test_predicted_seconds_are_those_of_the_list(sizes: dict[str, int], precision: Precision) -> None:
    """The profile's seconds of one microbatch's collectives, put together, are the price of the whole list."""
    layout = StepLayout(tokens=65536, gpus=16, **sizes)
    config = preset("7b", layers=4, moe=MOE if layout.ep > 1 else None)
    profile = derive_profile(config, MACHINE, layout, precision=precision)
    layers, ends = profile.layer_profiles(), (profile.embedding, profile.head)
    step = StepCollectives(config=config, layout=layout, precision=precision)
    seconds = sum(2 * layer.gather_s + layer.forward_exchange_s + layer.backward_exchange_s for layer in layers)
    seconds += sum(layer.sync_s for layer in layers)
    seconds -= exchange_s(
        step.gather(step.layer_units(experts=layout.ep > 1)[0]), MACHINE, layout
    )  # the last one stays
    seconds += sum(end.forward_exchange_s + end.backward_exchange_s + end.sync_s for end in ends)
    listed = [each for each in step.step() if each.ranks is not Ranks.ALL]  # three numbers, once a step
    assert seconds == pytest.approx(exchange_s(listed, MACHINE, layout), rel=1e-12)
