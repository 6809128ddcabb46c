"""cluster.json: what is read, and what is refused in one line that names the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memo.errors import PlanError
from memo.mip import encode
from memo.mip.activation.files import HARDWARE_FORMAT, VERSIONS
from memo.mip.cluster import Cluster, NodeGroup, cluster_from_json, read_cluster
from memo.mip.inputs import hardware_preset
from memo.mip.strict_json import write_json

GIB, GIGABIT = 1 << 30, 1e9 / 8
EXAMPLE = Path(__file__).parents[3] / "examples" / "two_clusters.json"


def document(**changes: Any) -> dict[str, Any]:
    groups = [
        {"name": "ib", "gpu": "H100", "nodes": 4},
        {
            "name": "roce",
            "gpu": "a100-80g",
            "nodes": 8,
            "gpus_per_node": 4,
            "device": "40GiB",
            "host": "512GiB",
            "disk": "3TB",
            "net": "4x100Gb",
            "nic_latency_s": 1e-5,
            "nic_efficiency": 0.7,
            "oversubscription": 1.5,
            "levels": [
                {"name": "rail", "nodes": 2, "oversubscription": 2.0, "latency_s": 2e-5},
                {"name": "pod", "nodes": 4, "net": "1x25GB", "efficiency": 0.5},
            ],
        },
    ]
    links = [{"between": ["ib", "roce"], "net": "2x25Gb", "latency_s": 1e-4, "efficiency": 0.6, "trunk": "4x100Gb"}]
    return {"format": "memo-cluster", "version": 1, "groups": groups, "links": links} | changes


def parsed(document: dict[str, Any]) -> Cluster:
    return cluster_from_json(json.dumps(document))


def test_groups_are_presets_with_changes_and_links_are_between_them() -> None:
    cluster = parsed(document())
    ib, roce = cluster.groups
    assert (ib.name, ib.machine, ib.nodes, ib.gpus, ib.disk_bytes) == ("ib", hardware_preset("h100"), 4, 32, 0)
    machine, network = roce.machine, roce.machine.network
    assert (machine.gpus_per_node, machine.device_bytes, machine.host_bytes) == (4, 40 * GIB, 512 * GIB)
    assert machine.peak_flops == hardware_preset("a100").peak_flops
    assert (network.nics_per_node, network.nic_bytes_per_s) == (4, 100 * GIGABIT)
    assert (network.nic_latency_s, network.nic_efficiency, network.oversubscription) == (1e-5, 0.7, 1.5)
    rail, pod = network.levels
    assert (rail.nodes, rail.nics_per_node, rail.oversubscription, rail.latency_s) == (2, 0, 2.0, 2e-5)
    assert (pod.nodes, pod.nics_per_node, pod.nic_bytes_per_s, pod.efficiency) == (4, 1, 25e9, 0.5)
    assert (roce.disk_bytes, roce.gpus, cluster.gpus) == (3 * 10**12, 32, 64)
    (link,) = cluster.connections
    assert (link.links.nics_per_node, link.links.nic_bytes_per_s) == (2, 25 * GIGABIT)
    assert (link.links.latency_s, link.links.efficiency) == (1e-4, 0.6)
    assert link.trunk_bytes_per_s == 400 * GIGABIT
    one = document()
    one["links"][0]["trunk"] = "400Gb"
    assert parsed(one) == cluster


def test_a_description_of_a_machine_is_found_beside_the_file(tmp_path: Path) -> None:
    machine = hardware_preset("h200")
    (tmp_path / "mine.json").write_text(write_json(HARDWARE_FORMAT, VERSIONS[HARDWARE_FORMAT], encode(machine)))
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(document(groups=[{"name": "all", "gpu": "mine.json", "nodes": 2}], links=[])))
    assert read_cluster(path) == Cluster(groups=(NodeGroup(name="all", machine=machine, nodes=2),))
    path.write_text(json.dumps(document(groups=[{"name": "all", "gpu": "other.json", "nodes": 2}], links=[])))
    with pytest.raises(PlanError, match=r"/other\.json: cannot read"):
        read_cluster(path)


def test_the_example_is_read() -> None:
    assert [group.name for group in read_cluster(EXAMPLE).groups] == ["ib", "roce"]


def group(**changes: Any) -> dict[str, Any]:
    entry = {"name": "one", "gpu": "h100", "nodes": 2} | changes
    return document(groups=[{key: value for key, value in entry.items() if value is not ...}], links=[])


def link(**changes: Any) -> dict[str, Any]:
    return document(links=[{"between": ["ib", "roce"], "net": "1x25Gb"} | changes])


REFUSED = {
    "another format": (document(format="memo-hardware"), "'memo-hardware', not memo-cluster"),
    "another version": (document(version=2), "version is 2"),
    "an unknown key": (document(speed=1), "the file has the unknown key 'speed'"),
    "no group": (document(groups=[], links=[]), "0 groups of nodes"),
    "seventeen groups": (document(groups=[document()["groups"][0]] * 17), "17 groups of nodes"),
    "two of one name": (document(groups=[document()["groups"][0]] * 2, links=[]), "two groups are named 'ib'"),
    "an unknown key of a group": (group(speed=1), "groups 0 has the unknown key 'speed'"),
    "no GPU": (group(gpu=...), "groups 0 has no gpu"),
    "an unknown GPU": (group(gpu="h1000"), "group 'one': gpu: unknown GPU 'h1000'"),
    "no node": (group(nodes=0), "group 'one': nodes is 0"),
    "minus nodes": (group(nodes=-2), "group 'one': nodes is -2"),
    "half a node": (group(nodes=1.5), "groups 0: nodes is not a whole number"),
    "no GPU in a node": (group(gpus_per_node=0), "group 'one': gpus_per_node is 0"),
    "a size without a unit": (group(device="80"), "group 'one': device: '80' can be read in several ways"),
    "a size that is none": (group(host="much"), "group 'one': host: cannot read 'much'"),
    "a number as a size": (group(host=80), "groups 0: host is not a text"),
    "a device of nothing": (group(device="0B"), "group 'one': device is 0"),
    "a net that is none": (group(net="fast"), "group 'one': net: 'fast': give the NICs"),
    "no net between nodes": (group(net="none"), "group 'one': no network connects its 2 nodes"),
    "a negative latency": (group(nic_latency_s=-1.0), "group 'one': network: nic_latency_s is -1.0"),
    "an efficiency of 2": (group(nic_efficiency=2.0), "group 'one': network: efficiencies"),
    "a unit of one node": (group(levels=[{"name": "pod", "nodes": 1}]), "level 'pod': nodes is 1"),
    "levels in the wrong order": (
        group(levels=[{"name": "pod", "nodes": 4}, {"name": "rail", "nodes": 2}]),
        "group 'one': network: units of a level",
    ),
    "an oversubscription below 1": (
        group(levels=[{"name": "pod", "nodes": 4, "oversubscription": 0.5}]),
        "level 'pod': an efficiency is",
    ),
    "a level's efficiency alone": (
        group(levels=[{"name": "pod", "nodes": 4, "efficiency": 0.5}]),
        "level 'pod': efficiency needs net",
    ),
    "a name that is none": (group(name=""), "a group of nodes is named ''"),
    "a link to nowhere": (link(between=["ib", "tcp"]), "a link names the group 'tcp'"),
    "a link to itself": (link(between=["ib", "ib"]), "link between 'ib' and 'ib'"),
    "a link of three": (link(between=["ib", "ib", "ib"]), "between is not an array of 2"),
    "two links of a pair": (
        document(links=[{"between": pair, "net": "1x25Gb"} for pair in (["ib", "roce"], ["roce", "ib"])]),
        "two links are between ib and roce",
    ),
    "a link without NICs": (link(net="none"), "link between 'ib' and 'roce': it needs the NICs"),
    "a link of no rate": (link(net="1x0Gb"), "link between 'ib' and 'roce': net: '1x0Gb'"),
    "a link's negative latency": (link(latency_s=-1e-6), "link between 'ib' and 'roce': level"),
    "a trunk that is none": (link(trunk="100"), "link between 'ib' and 'roce': trunk: '1x100'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_in_the_format_is_one_line_that_names_the_key(name: str) -> None:
    wrong, words = REFUSED[name]
    with pytest.raises(PlanError) as caught:
        parsed(wrong)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_rates_that_are_no_numbers_are_refused(word: str) -> None:
    text = json.dumps(link(latency_s=0.125)).replace("0.125", word)
    with pytest.raises(PlanError, match=r"is not a JSON number|is too large"):
        cluster_from_json(text)
