"""Layouts over groups of nodes: who communicates with whom, and what the profile of a stage makes of it."""

from __future__ import annotations

import dataclasses

import pytest

from memo.errors import UsageError
from memo.gpt import preset
from memo.gpt.arithmetic import StepLayout, derive_profile
from memo.mip.inputs import Collectives, Hardware, NetworkLevel, RankGroup, hardware_preset

LINK = NetworkLevel(name="between", nics_per_node=1, nic_bytes_per_s=1e9, efficiency=1.0, latency_s=1e-4)


def joined() -> Hardware:
    machine = hardware_preset("h100")
    return dataclasses.replace(machine, network=dataclasses.replace(machine.network, levels=(LINK,)))


def counts(group: RankGroup) -> tuple[int, ...]:
    return tuple(part.size for part in group.parts)


def test_replicas_of_several_groups_of_nodes_reduce_across_them() -> None:
    layout = StepLayout(tokens=1024, gpus=40, tp=4, islands=(4, 6))
    found = layout.data_group(8)
    assert (found.size, counts(found)) == (10, (4, 6))
    assert (found.nodes, found.per_node, found.fewest) == (5, 2, 2)
    tensor = layout.tensor_group(8)
    assert (tensor.size, tensor.nodes, tensor.parts) == (4, 1, ())


def test_a_hybrid_group_within_the_groups_of_nodes_does_not_cross() -> None:
    layout = StepLayout(tokens=1024, gpus=40, tp=4, islands=(4, 6))
    assert counts(layout.data_group(8, size=2)) == ()
    copies = layout.copies_group(8, shards=2)
    assert (copies.size, counts(copies)) == (5, (2, 3))
    assert counts(layout.data_group(8, size=5)) == (4, 6), "five neighbours are in no group alone"


def test_islands_are_all_replicas() -> None:
    for islands in ((4, 5), (10, 0)):
        with pytest.raises(UsageError, match="replicas in groups of nodes"):
            StepLayout(tokens=1024, gpus=40, tp=4, islands=islands)


def test_a_stage_in_a_group_of_one_node_does_not_leave_it() -> None:
    layout = StepLayout(tokens=1024, gpus=16, tp=4, pp=4)
    assert layout.leaves_node(8)
    assert not dataclasses.replace(layout, group_gpus=8).leaves_node(8)
    assert dataclasses.replace(layout, group_gpus=16).leaves_node(8)
    assert not StepLayout(tokens=1024, gpus=16, tp=4, pp=2, islands=(1, 1)).leaves_node(8)


def test_the_optimizer_takes_as_long_as_its_stages_layers() -> None:
    machine, layout = hardware_preset("h100"), StepLayout(tokens=1024, gpus=2, pp=2)
    config = preset("tiny", layers=12)
    seconds = [
        derive_profile(config, machine, dataclasses.replace(layout, stage_layers=layers)).optimizer_s
        for layers in (0, 5, 6, 7)
    ]
    assert seconds[0] == seconds[2]
    assert seconds[3] - seconds[2] == pytest.approx(seconds[2] - seconds[1])
    assert seconds[1] < seconds[2]


def test_a_tied_table_is_summed_over_the_link_between_the_ends() -> None:
    config = dataclasses.replace(preset("tiny", layers=4, hidden=64, heads=8), tie_embeddings=True)
    layout = StepLayout(tokens=1024, gpus=16, tp=8, pp=2)
    near = derive_profile(config, joined(), layout)
    apart = derive_profile(config, joined(), dataclasses.replace(layout, ends_apart=True))
    nbytes = 2.0 * config.vocab_size * config.hidden / 8
    times = Collectives(joined())
    across = RankGroup.across([RankGroup(size=1, per_node=1)] * 2)
    waited = times.all_reduce_s(nbytes, across) - times.all_reduce_s(nbytes, RankGroup(size=2, per_node=1))
    assert waited > 0
    assert apart.optimizer_exchange_s - near.optimizer_exchange_s == pytest.approx(waited)
