"""Placements of a layout: which there are, which there are not, and the machine that a stage has."""

from __future__ import annotations

import dataclasses

import pytest
from small_clusters import uniform_cluster

from memo.errors import PlanError, UsageError
from memo.gpt.arithmetic import StepLayout
from memo.mip.cluster import Cluster, ClusterPlacement, Connection, Crossing, NodeGroup, slowest_machine
from memo.mip.inputs import Collectives, NetworkLevel, hardware_preset

H100, A100 = hardware_preset("h100"), hardware_preset("a100-80g")
ETHERNET = NetworkLevel(name="ethernet", nics_per_node=1, nic_bytes_per_s=1e9, efficiency=1.0, latency_s=1e-4)


def cluster(nodes: dict[str, int], *links: tuple[str, str]) -> Cluster:
    return Cluster(
        groups=tuple(
            NodeGroup(name=name, machine=H100 if name.startswith("h") else A100, nodes=count)
            for name, count in nodes.items()
        ),
        connections=tuple(Connection(between=pair, links=ETHERNET) for pair in links),
    )


def found(cluster: Cluster, gpus: int, **sizes: int) -> list[str]:
    return [placement.describe() for placement in cluster.placements(StepLayout(tokens=1024, gpus=gpus, **sizes))]


def test_a_uniform_cluster_has_one_placement() -> None:
    (only,) = uniform_cluster(H100, nodes=4).placements(StepLayout(tokens=1024, gpus=32, tp=4, pp=2))
    assert only.crossing is Crossing.NOTHING
    assert only.machine(0) == only.machine(1) == H100
    assert only.describe() == "stages 0 and 1 on h100"


def test_every_order_and_number_of_stages_is_a_placement() -> None:
    two = cluster({"h": 2, "a": 3}, ("h", "a"))
    assert found(two, 32, tp=8, pp=4) == [
        # one group has no room for four nodes
        "stages 0 on h, 1 to 3 on a",
        "stages 0 and 1 on h, 2 and 3 on a",
        "stages 0 and 1 on a, 2 and 3 on h",
        "stages 0 to 2 on a, 3 on h",
    ]
    assert found(two, 16, tp=8, pp=2) == [
        "stages 0 and 1 on h",
        "stages 0 and 1 on a",
        "stages 0 on h, 1 on a",
        "stages 0 on a, 1 on h",
    ]


def test_replicas_are_divided_in_every_way() -> None:
    two = cluster({"h": 2, "a": 3}, ("h", "a"))
    assert found(two, 40, tp=8) == ["replicas: 2 on h, 3 on a"]
    assert found(two, 24, tp=8) == ["all on a", "replicas: 1 on h, 2 on a", "replicas: 2 on h, 1 on a"]
    # Two replicas of a pipeline over two nodes: one in each group; or the pipeline across, a stage's two replicas in one.
    assert found(two, 32, tp=8, pp=2) == ["stages 0 on h, 1 on a", "stages 0 on a, 1 on h", "replicas: 1 on h, 1 on a"]


def test_groups_that_no_link_joins_do_not_communicate() -> None:
    apart = cluster({"h": 2, "a": 2})
    assert found(apart, 16, tp=8, pp=2) == ["stages 0 and 1 on h", "stages 0 and 1 on a"]
    with pytest.raises(UsageError, match="has no place on the groups of nodes"):
        found(apart, 32, tp=8, pp=4)
    # In a row, what the ends have to say to each other goes through the middle.
    row = cluster({"h": 1, "a": 1, "h2": 1}, ("h", "a"), ("a", "h2"))
    assert found(row, 24, tp=8, pp=3) == ["stages 0 on h, 1 on a, 2 on h2", "stages 0 on h2, 1 on a, 2 on h"]
    ends, _ = row.placements(StepLayout(tokens=1024, gpus=24, tp=8, pp=3))
    assert ends.send_s(2, 0, 1e9) == ends.send_s(0, 1, 1e9)
    with pytest.raises(UsageError, match="groups that exchange are linked"):
        found(row, 24, tp=8)


def test_more_gpus_than_there_are_are_refused() -> None:
    with pytest.raises(UsageError, match=r"64 GPUs .* is more than the cluster's 40 \(h 16, a 24\)"):
        found(cluster({"h": 2, "a": 3}, ("h", "a")), 64, tp=8, pp=4)


def test_placements_that_differ_in_names_alone_are_one() -> None:
    alike = cluster({"h1": 1, "h2": 1, "h3": 1}, ("h1", "h2"), ("h2", "h3"), ("h1", "h3"))
    assert found(alike, 24, tp=8, pp=3) == ["stages 0 on h1, 1 on h2, 2 on h3"]
    assert found(alike, 16, tp=8) == ["replicas: 1 on h1, 1 on h2"]


def stages(placement: ClusterPlacement) -> list[str]:
    return [placement.machine(stage).name for stage in range(len(placement.places))]


def test_a_stage_has_its_groups_machine_and_replicas_across_the_slowest() -> None:
    two = cluster({"h": 2, "a": 2}, ("h", "a"))
    across, _, replicas = two.placements(StepLayout(tokens=1024, gpus=32, tp=8, pp=2))
    assert stages(across) == ["h100", "a100-80g"]
    assert across.machine(0).network.levels[-1] == ETHERNET, "for tables that are tied"
    assert stages(replicas) == ["h100 + a100-80g"] * 2
    slowest = replicas.machine(0)
    assert slowest.peak_flops == A100.peak_flops
    assert slowest.peak_flops * slowest.matmul_efficiency == pytest.approx(
        min(one.peak_flops * one.matmul_efficiency for one in (H100, A100))
    )
    assert slowest.network.levels == (ETHERNET,)
    assert replicas.islands(0) == (1, 1)
    assert across.islands(0) == ()


def test_a_message_to_another_group_takes_the_links_between_them() -> None:
    across, *_ = cluster({"h": 2, "a": 2}, ("h", "a")).placements(StepLayout(tokens=1024, gpus=32, tp=8, pp=2))
    # Eight GPUs share the node's 1 GB/s.
    launch = H100.network.launch_s
    assert across.send_s(0, 1, 1e9) == pytest.approx(launch + 1e-4 + 8.0)
    assert across.send_s(0, 1, 1e9) == across.send_s(1, 0, 1e9)


def test_the_slowest_machine_is_the_least_of_each_rate_by_gpu() -> None:
    assert slowest_machine([H100, H100]) is H100
    half = dataclasses.replace(
        A100,
        gpus_per_node=4,
        host_bytes=A100.host_bytes // 2,
        network=dataclasses.replace(A100.network, nics_per_node=2),
    )
    found = slowest_machine([H100, half])
    assert found.gpus_per_node == 4
    assert found.host_bytes == half.host_bytes, "the H100's node has twice as much for twice as many"
    assert found.network.nics_per_node * found.network.nic_bytes_per_s == pytest.approx(2 * 25e9 * 0.88)
    group = StepLayout(tokens=1024, gpus=8).data_group(4)
    times = [Collectives(machine).all_reduce_s(1e9, group) for machine in (found, H100, half)]
    assert times[0] >= max(times[1:])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Connection(between=("a", "b"), links=NetworkLevel(name="none")), "it needs the NICs of a node"),
        (lambda: Connection(between=("a", "b"), links=ETHERNET, trunk_bytes_per_s=float("nan")), "trunk is nan"),
        (lambda: Connection(between=("a", "b"), links=ETHERNET, trunk_bytes_per_s=-1.0), "trunk is -1.0"),
        (lambda: NodeGroup(name="a", machine=H100, nodes=1, disk_bytes=-1), "disk is -1 bytes"),
        (lambda: NodeGroup(name="a\nb", machine=H100, nodes=1), "printable"),
        (lambda: Cluster(groups=()), "0 groups"),
    ],
)
def test_what_cannot_be_is_refused(make: object, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        make()  # type: ignore[operator]
