"""Collectives of a doctor's report in place of a preset's: the times that were measured are predicted."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from memo.errors import PlanError
from memo.mip.inputs import PRESETS, Collectives, Hardware, Network, RankGroup, with_measured_rates

GB = 1e9
SIZES = [1 << 10, 1 << 20, 1 << 30]


def fit(collective: str, latency_s: float, bytes_per_s: float, *, ranks: int = 8, nodes: int = 1) -> dict[str, Any]:
    each = ranks // nodes
    return {
        "collective": collective,
        "within_node": nodes == 1,
        "ranks": ranks,
        "nodes": nodes,
        "ranks_per_node": each,
        "fewest_ranks_per_node": each,
        "times": [{"message_bytes": size, "median_s": latency_s + size / bytes_per_s} for size in SIZES],
        "latency_s": latency_s,
        "bytes_per_s": bytes_per_s,
    }


def with_fits(path: Path, machine: Hardware, *fits: dict[str, Any]) -> Hardware:
    report = path / "doctor.json"
    report.write_text(json.dumps({"gpus": [], "disks": [], "collectives": {"fits": fits}}))
    return with_measured_rates(machine, report)


IN_NODE = [fit("all_gather", 40e-6, 200 * GB), fit("reduce_scatter", 40e-6, 200 * GB), fit("send", 10e-6, 100 * GB)]
OF_ALL = [fit("all_gather", 150e-6, 30 * GB, ranks=32, nodes=4), fit("send", 30e-6, 5 * GB, ranks=32, nodes=4)]


def test_the_measured_times_are_predicted(tmp_path: Path) -> None:
    machine = with_fits(tmp_path, PRESETS["h100"], *IN_NODE, *OF_ALL)
    times = Collectives(machine)
    node, cluster = (RankGroup.of(size, stride=1, gpus_per_node=8) for size in (8, 32))
    for size in SIZES:
        assert times.all_gather_s(size, node) == pytest.approx(40e-6 + size / (200 * GB))
        assert times.all_gather_s(size, cluster) == pytest.approx(150e-6 + size / (30 * GB))
    # The launch and a step of a ring follow from a message within the node: six steps more take 30 us more.
    assert machine.network.node_latency_s == pytest.approx(5e-6)
    assert machine.network.launch_s == pytest.approx(5e-6)
    # No rate exceeds its line.
    assert machine.nvlink_bytes_per_s == PRESETS["h100"].nvlink_bytes_per_s
    assert machine.network.nic_bytes_per_s == PRESETS["h100"].network.nic_bytes_per_s
    assert machine.network.nic_efficiency == pytest.approx(30 * GB * 31 / 32 / (8 * 50 * GB))


def test_a_line_that_was_exceeded_is_raised(tmp_path: Path) -> None:
    fits = [fit("all_gather", 40e-6, 800 * GB), fit("all_gather", 90e-6, 600 * GB, ranks=32, nodes=4)]
    machine = with_fits(tmp_path, PRESETS["h100"], *fits)
    assert machine.nvlink_bytes_per_s == pytest.approx(700 * GB)
    assert machine.network.node_efficiency == machine.network.nic_efficiency == 1.0
    assert machine.network.nic_bytes_per_s == pytest.approx(600 * GB * 31 / 32 / 8)
    times = Collectives(machine)
    assert times.all_gather_s(1 << 30, RankGroup.of(32, stride=1, gpus_per_node=8)) == pytest.approx(
        90e-6 + (1 << 30) / (600 * GB), rel=0.01
    )


def test_a_network_that_was_measured_connects_nodes_of_a_machine_without(tmp_path: Path) -> None:
    alone = dataclasses.replace(PRESETS["h100"], network=Network(node_efficiency=0.5, oversubscription=2.0))
    machine = with_fits(tmp_path, alone, *OF_ALL)
    seconds = Collectives(machine).all_gather_s(1 << 30, RankGroup.of(32, stride=1, gpus_per_node=8))
    # The steps within nodes are the base's, and already longer than the latency measured.
    assert seconds == pytest.approx(max(150e-6, 10e-6 + 28 * 1.9e-6) + (1 << 30) / (30 * GB))
    assert machine.network.node_efficiency == 0.5


def test_a_rate_counts_only_where_bytes_took_longer_than_the_latency(tmp_path: Path) -> None:
    small = fit("all_gather", 1.0, 200 * GB)
    machine = with_fits(tmp_path, PRESETS["h100"], small)
    assert machine.nvlink_bytes_per_s == PRESETS["h100"].nvlink_bytes_per_s
    assert machine.network.node_efficiency == PRESETS["h100"].network.node_efficiency
    assert Collectives(machine).all_gather_s(0, RankGroup(size=8, per_node=8)) == pytest.approx(1.0)


def test_reports_without_collectives_leave_the_network(tmp_path: Path) -> None:
    report = tmp_path / "doctor.json"
    for extra in ({}, {"collectives": None}, {"collectives": {"fits": []}}):
        report.write_text(json.dumps({"gpus": [], "disks": [], **extra}))
        assert with_measured_rates(PRESETS["h100"], report) == PRESETS["h100"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"latency_s": -1.0}, "latency_s is not a time"),
        ({"latency_s": "soon"}, "latency_s is not a time"),
        ({"bytes_per_s": 0}, "bytes_per_s is not a rate"),
        ({"ranks": 1.5}, "ranks is not a number"),
        ({"ranks": 1, "ranks_per_node": 1, "fewest_ranks_per_node": 1}, "1 ranks on 1 nodes"),
        ({"nodes": 9}, "8 ranks on 9 nodes"),
        ({"fewest_ranks_per_node": 9}, "9 to 8 on each"),
        ({"times": 3}, "no list of times"),
    ],
)
def test_collectives_that_are_none_are_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        with_fits(tmp_path, PRESETS["h100"], {**IN_NODE[0], **change})
    assert "\n" not in str(caught.value)
