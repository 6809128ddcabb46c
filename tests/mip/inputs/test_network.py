"""Groups on nodes, and the times of collectives, against arithmetic by hand."""

from __future__ import annotations

import dataclasses
import random

import pytest

from memo.errors import PlanError, UsageError
from memo.mip.inputs import PRESETS, Collectives, Network, NetworkLevel, RankGroup, parse_network

GB = 1e9
# A GPU sends 100 GB/s to its peers, and its part of four NICs of 10 GB/s is 4 GB/s.
MACHINE = dataclasses.replace(
    PRESETS["a100-80g"],
    nvlink_bytes_per_s=125 * GB,
    gpus_per_node=8,
    network=Network(
        nics_per_node=4,
        nic_bytes_per_s=10 * GB,
        nic_efficiency=0.8,
        node_efficiency=0.8,
        nic_latency_s=10e-6,
        node_latency_s=1e-6,
        launch_s=100e-6,
    ),
)
TIMES = Collectives(MACHINE)
ALONE = Collectives(dataclasses.replace(MACHINE, network=Network()))


def group(size: int, stride: int = 1, gpus: int = 0, *, gpus_per_node: int = 8) -> RankGroup:
    return RankGroup.of(size, stride=stride, gpus_per_node=gpus_per_node, gpus=gpus)


# Which nodes a group is on


@pytest.mark.parametrize(
    ("found", "per_node", "fewest", "nodes"),
    [
        (group(1), 1, 1, 1),
        (group(8), 8, 8, 1),
        (group(2, 4), 2, 2, 1),  # context ranks beside four tensor ranks: 0 and 4
        (group(2, 8), 1, 1, 2),  # stages of a node each: 0 and 8
        (group(8, 2), 4, 4, 2),  # 0, 2, 4, 6 and 8 to 14
        (group(16), 8, 8, 2),
        (group(128, 8), 1, 1, 128),  # data-parallel ranks beside eight tensor ranks
        (group(12), 8, 4, 2),
        (group(9), 8, 1, 2),
        (group(3, 4), 2, 1, 2),  # 0, 4 and 8
        (group(3, 3), 2, 1, 2),  # 2, 5 and 8; 0, 3 and 6 are on one node
        (group(6, gpus=6), 6, 6, 1),
        (group(6, gpus=12), 4, 2, 2),  # 6, 7 and 8 to 11
        (group(3, gpus=12), 2, 1, 2),  # 6, 7 and 8
        (group(4, gpus=12), 4, 4, 1),
        (group(4, gpus=6, gpus_per_node=6), 4, 4, 1),
        (group(4, gpus=12, gpus_per_node=6), 2, 2, 2),  # 4, 5 and 6, 7
        (group(3, gpus_per_node=1), 1, 1, 3),
    ],
)
def test_ranks_fill_one_node_after_the_other(found: RankGroup, per_node: int, fewest: int, nodes: int) -> None:
    assert (found.per_node, found.fewest, found.nodes) == (per_node, fewest, nodes)


def test_the_slowest_group_is_that_of_counting_every_rank() -> None:
    dice = random.Random(7)
    for _ in range(500):
        size, stride, node = dice.randint(1, 12), dice.randint(1, 20), dice.randint(1, 10)
        blocks = dice.randint(1, 12)
        counts = []
        for block in range(blocks):
            for first in range(stride):
                nodes = [(block * size * stride + first + rank * stride) // node for rank in range(size)]
                counts.append([nodes.count(number) for number in set(nodes)])
        fewest = min((min(each) for each in counts if len(each) > 1), default=size)
        found = group(size, stride, blocks * size * stride, gpus_per_node=node)
        assert (found.nodes > 1) == any(len(each) > 1 for each in counts)
        assert found.fewest == fewest
        assert [found.per_node, found.nodes] in [[max(each), len(each)] for each in counts if min(each) == fewest]


def test_a_group_by_size_and_ranks_on_a_node_has_the_rest_on_the_last() -> None:
    found = RankGroup(size=12, per_node=8)
    assert (found.nodes, found.fewest) == (2, 4)
    with pytest.raises(PlanError, match="3 on a node"):
        RankGroup(size=2, per_node=3)


# Times


def test_an_all_gather_within_a_node_takes_its_steps_and_the_bytes_of_the_others() -> None:
    # 100 us, seven steps of 1 us, and 7/8 of 8 GB at 100 GB/s.
    assert TIMES.all_gather_s(8 * GB, group(8)) == pytest.approx(107e-6 + 0.07)
    assert TIMES.reduce_scatter_s(8 * GB, group(8)) == TIMES.all_gather_s(8 * GB, group(8))
    assert TIMES.all_gather_s(8 * GB, group(1)) == 0.0


def test_a_ring_leaves_each_node_over_the_nics_of_its_ranks_together() -> None:
    # Fourteen steps within nodes, one between them; 15/16 of 16 GB over eight GPUs' 4 GB/s.
    assert TIMES.all_gather_s(16 * GB, group(16)) == pytest.approx(124e-6 + 15 / 32)
    # One rank a node: 3/4 of 4 GB over one GPU's 4 GB/s, while the node's other GPUs have groups of their own.
    assert TIMES.all_gather_s(4 * GB, group(4, 8)) == pytest.approx(130e-6 + 3 / 4)
    # Eight ranks on one node and four on the next, whose NICs are the bottleneck.
    assert TIMES.all_gather_s(12 * GB, group(12)) == pytest.approx(120e-6 + 11 / 16)


def test_a_fast_network_leaves_the_links_within_a_node_as_the_bottleneck() -> None:
    network = dataclasses.replace(MACHINE.network, nic_bytes_per_s=1000 * GB)
    times = Collectives(dataclasses.replace(MACHINE, network=network))
    assert times.all_gather_s(16 * GB, group(16)) == pytest.approx(124e-6 + 15 / 100)


def test_an_all_reduce_goes_twice_around() -> None:
    assert TIMES.all_reduce_s(8 * GB, group(8)) == pytest.approx(100e-6 + 2 * (7e-6 + 0.07))
    assert TIMES.all_reduce_s(16 * GB, group(16)) == pytest.approx(100e-6 + 2 * (24e-6 + 15 / 32))


def test_a_small_all_reduce_over_many_nodes_takes_the_tree() -> None:
    ranks = group(1024)
    # Up and down: 7 us within a node and seven steps of 21 us between 128; a ring would take 2 x (896 + 1270) us.
    assert TIMES.all_reduce_s(0, ranks) == pytest.approx(100e-6 + 2 * (7 + 7 * 21) * 1e-6)
    # 32 MB pass each of the tree's ranks up and down at nine tenths of a ring's 32 GB/s.
    assert TIMES.all_reduce_s(32e6, ranks) == pytest.approx(100e-6 + 2 * (154e-6 + 1e-3 / 0.9))
    # An all-gather has no tree.
    assert TIMES.all_gather_s(0, ranks) == pytest.approx(100e-6 + 2166e-6)
    # Large ones go around the ring, whose rate is higher.
    assert TIMES.all_reduce_s(64 * GB, ranks) == pytest.approx(100e-6 + 2 * (2166e-6 + 2 * 1023 / 1024))


def test_an_all_to_all_sends_each_peer_its_part() -> None:
    assert TIMES.all_to_all_s(8 * GB, group(8)) == pytest.approx(101e-6 + 0.07)
    # 16 ranks on two nodes: half of the bytes leave the node, over each GPU's own 4 GB/s; eight peers there at once.
    assert TIMES.all_to_all_s(16 * GB, group(16)) == pytest.approx(111e-6 + 8 / 4)
    # Twelve: a rank on the second node has eight of its eleven peers on the first.
    assert TIMES.all_to_all_s(12 * GB, group(12)) == pytest.approx(111e-6 + 8 / 4)
    assert TIMES.all_to_all_s(0, group(64)) == pytest.approx(100e-6 + 1e-6 + 7 * 10e-6)
    assert TIMES.all_to_all_s(GB, group(1)) == 0.0


def test_a_message_takes_its_link() -> None:
    assert TIMES.send_s(GB, beyond_node=False) == pytest.approx(101e-6 + 0.01)
    assert TIMES.send_s(GB, beyond_node=True) == pytest.approx(110e-6 + 0.25)


def test_an_oversubscribed_network_carries_less_between_nodes_alone() -> None:
    network = dataclasses.replace(MACHINE.network, oversubscription=2.0)
    times = Collectives(dataclasses.replace(MACHINE, network=network))
    assert times.all_gather_s(16 * GB, group(16)) == pytest.approx(124e-6 + 15 / 16)
    assert times.send_s(GB, beyond_node=True) == pytest.approx(110e-6 + 0.5)
    assert times.all_gather_s(8 * GB, group(8)) == TIMES.all_gather_s(8 * GB, group(8))


def test_what_a_collective_takes_of_the_link_to_the_host() -> None:
    assert TIMES.host_link_bytes_per_s(group(8)) == 0.0
    assert TIMES.host_link_bytes_per_s(group(16)) == 4 * GB
    through = dataclasses.replace(MACHINE.network, peers_through_pcie=True)
    times = Collectives(dataclasses.replace(MACHINE, network=through))
    assert times.host_link_bytes_per_s(group(8)) == 100 * GB
    assert times.host_link_bytes_per_s(group(1)) == 0.0


def test_nodes_that_no_network_connects_cannot_communicate() -> None:
    for call in (ALONE.all_gather_s, ALONE.all_reduce_s, ALONE.all_to_all_s):
        with pytest.raises(UsageError, match=r"16 ranks that communicate are on 2 nodes of 8 GPUs.*--net 8x400Gb"):
            call(GB, group(16))
        assert call(GB, group(8)) > 0
    with pytest.raises(UsageError, match="2 ranks that communicate are on 2 nodes"):
        ALONE.send_s(GB, beyond_node=True)


def test_published_bus_bandwidths_are_met() -> None:
    # GB/s that the ring's bytes cross a link with: nccl-tests issues 175, 212 and 119, which has four NICs a node.
    for gpu, low, high in (("a100-80g", 225, 240), ("h100", 360, 375), ("a800", 150, 162)):
        seconds = Collectives(PRESETS[gpu]).all_gather_s(8 * GB, group(8))
        assert low < 8 * GB * 7 / 8 / seconds / GB < high
    four = dataclasses.replace(PRESETS["a100-80g"], network=parse_network("4x200Gb", PRESETS["a100-80g"].network))
    seconds = Collectives(four).all_gather_s(8 * GB, group(24))
    assert 84 < 8 * GB * 23 / 24 / seconds / GB < 97


# --net


@pytest.mark.parametrize(
    ("text", "count", "rate"),
    [("8x400Gb", 8, 50 * GB), ("4x25GB", 4, 25 * GB), ("1X0.5gb", 1, GB / 16), ("NONE", 0, 0.0)],
)
def test_nics_are_read_in_bits_or_bytes(text: str, count: int, rate: float) -> None:
    base = Network(nics_per_node=2, nic_bytes_per_s=GB, nic_latency_s=7e-6, node_efficiency=0.5)
    network = parse_network(text, base)
    assert (network.nics_per_node, network.nic_bytes_per_s) == (count, rate)
    assert dataclasses.replace(network, nics_per_node=2, nic_bytes_per_s=GB) == base


@pytest.mark.parametrize(
    "text", ["", "8", "8x", "x400Gb", "0x400Gb", "8x0Gb", "8x400", "8x400Mb", "-8x400Gb", "8x4e9Gb", "8x400Gb\n", "no"]
)
def test_other_text_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="such as 8x400Gb") as caught:
        parse_network(text, Network())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"nics_per_node": 8},
        {"nic_bytes_per_s": GB},
        {"nic_efficiency": 0.0},
        {"node_efficiency": 1.5},
        {"oversubscription": 0.5},
        {"nic_latency_s": -1.0},
        {"launch_s": float("nan")},
    ],
)
def test_networks_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(PlanError, match="network"):
        Network(**wrong)  # type: ignore[arg-type]


# Levels above the nodes: a GPU's part of the NICs is 4 GB/s within a pod of two nodes, and half of it beyond.

POD = NetworkLevel(name="pod", nodes=2, oversubscription=2.0, latency_s=15e-6)
PODS = Collectives(dataclasses.replace(MACHINE, network=dataclasses.replace(MACHINE.network, levels=(POD,))))


def test_a_group_within_a_unit_does_not_meet_the_level() -> None:
    for known in (group(8), group(16), group(2, 8), group(16, gpus=64)):
        assert PODS.all_gather_s(1e9, known) == TIMES.all_gather_s(1e9, known)
        assert PODS.all_reduce_s(1e9, known) == TIMES.all_reduce_s(1e9, known)
        assert PODS.all_to_all_s(1e9, known) == TIMES.all_to_all_s(1e9, known)


def test_a_ring_across_units_takes_their_links() -> None:
    # 32 ranks on 4 nodes in 2 pods: 16 of each pod send 2 GB/s each, 32 together, as the 8 of a node with 4 GB/s each.
    assert PODS.all_gather_s(32 * GB, group(32)) == pytest.approx(
        100e-6 + 28 * 1e-6 + 3 * 10e-6 + 1 * 5e-6 + 31 / 32 * 32 * GB / (32 * GB)
    )
    # One rank a node, on four nodes: 2 of a pod send 2 GB/s each, one of a node 4. A step between pods takes 15 us.
    assert PODS.all_gather_s(4 * GB, group(4, 8)) == pytest.approx(
        100e-6 + 3 * 10e-6 + 1 * 5e-6 + 3 / 4 * 4 * GB / (4 * GB)
    )
    # Two ranks, a pod apart: one of a pod sends 2 GB/s.
    assert PODS.all_gather_s(4 * GB, group(2, 16)) == pytest.approx(100e-6 + 10e-6 + 5e-6 + 1 / 2 * 4 * GB / (2 * GB))


def test_an_all_to_all_across_units_takes_their_links() -> None:
    # Of four ranks on four nodes two are in another pod: half of the bytes at 2 GB/s, three quarters at 4 GB/s.
    assert PODS.all_to_all_s(4 * GB, group(4, 8)) == pytest.approx(100e-6 + 10e-6 + 5e-6 + 2 * GB / (2 * GB))


def test_a_message_leaves_a_unit_where_the_job_does() -> None:
    assert PODS.send_s(GB, beyond_node=True, gpus=16) == TIMES.send_s(GB, beyond_node=True)
    assert PODS.send_s(GB, beyond_node=True, gpus=32) == pytest.approx(100e-6 + 15e-6 + GB / (2 * GB))
    assert PODS.send_s(GB, beyond_node=False, gpus=32) == TIMES.send_s(GB, beyond_node=False)


def test_a_level_may_have_nics_of_its_own() -> None:
    # 1 NIC of 8 GB/s, of which 0.5 is reached, is 0.5 GB/s for each of eight GPUs.
    level = dataclasses.replace(POD, nics_per_node=1, nic_bytes_per_s=8 * GB, efficiency=0.5, oversubscription=1.0)
    times = Collectives(dataclasses.replace(MACHINE, network=dataclasses.replace(MACHINE.network, levels=(level,))))
    assert times.all_gather_s(GB, group(2, 16)) == pytest.approx(100e-6 + 10e-6 + 5e-6 + 1 / 2 * GB / (0.5 * GB))


# Groups of nodes: four ranks on a node of one, and eight on two nodes of another, joined by 1 GB/s a node.

ETHERNET = NetworkLevel(name="ethernet", nics_per_node=1, nic_bytes_per_s=1 * GB, efficiency=1.0, latency_s=50e-6)
JOINED = Collectives(dataclasses.replace(MACHINE, network=dataclasses.replace(MACHINE.network, levels=(ETHERNET,))))
PARTS = (group(4), group(8, 2))


def test_a_group_across_groups_of_nodes_is_as_slow_as_the_fewest_ranks_links() -> None:
    across = RankGroup.across(PARTS)
    assert (across.size, across.per_node, across.fewest, across.nodes) == (12, 4, 4, 3)
    # Four ranks on one side send 1/8 GB/s each; within the second part four of a node 4 GB/s each.
    assert JOINED.all_gather_s(12 * GB, across) == pytest.approx(
        100e-6 + 9 * 1e-6 + 2 * 10e-6 + 1 * 40e-6 + 11 / 12 * 12 * GB / (0.5 * GB)
    )
    assert JOINED.all_gather_s(GB, PARTS[0]) == TIMES.all_gather_s(GB, PARTS[0])


def test_groups_of_single_nodes_need_no_network_of_their_own() -> None:
    network = dataclasses.replace(MACHINE.network, nics_per_node=0, nic_bytes_per_s=0.0, levels=(ETHERNET,))
    times = Collectives(dataclasses.replace(MACHINE, network=network))
    across = RankGroup.across([group(4), group(4)])
    assert times.all_gather_s(8 * GB, across) == pytest.approx(
        100e-6 + 6 * 1e-6 + 10e-6 + 40e-6 + 7 / 8 * 8 * GB / (0.5 * GB)
    )
    assert times.all_to_all_s(8 * GB, across) == pytest.approx(100e-6 + 1e-6 + 50e-6 + 4 * GB / (GB / 8))
    with pytest.raises(UsageError, match="8 ranks that communicate are on 2 nodes"):
        times.all_gather_s(GB, RankGroup.across(PARTS))


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        ((POD, dataclasses.replace(POD, nodes=2)), "units of a level have several nodes"),
        ((ETHERNET, POD), "units of a level have several nodes"),
        ((dataclasses.replace(POD, nodes=1),), "units of a level have several nodes"),
    ],
)
def test_levels_are_from_the_smallest_units_on(levels: tuple[NetworkLevel, ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Network(levels=levels)


def test_rates_of_a_level_are_positive() -> None:
    for wrong in (
        {"efficiency": 0.0},
        {"oversubscription": 0.5},
        {"nic_bytes_per_s": 1.0},
        {"latency_s": float("nan")},
    ):
        with pytest.raises(PlanError, match="level 'pod'"):
            dataclasses.replace(POD, **wrong)
