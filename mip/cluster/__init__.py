"""Clusters whose nodes are not alike: groups of nodes, placements of a layout on them, and stages of their size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.mip.cluster.cluster import (
        Cluster as Cluster,
        Connection as Connection,
        NodeGroup as NodeGroup,
        slowest_machine as slowest_machine,
    )
    from memo.mip.cluster.files import cluster_from_json as cluster_from_json, read_cluster as read_cluster
    from memo.mip.cluster.layer_division import (
        StageCosts as StageCosts,
        divide_equal_layers as divide_equal_layers,
        divide_layers as divide_layers,
    )
    from memo.mip.cluster.placement import (
        ClusterPlacement as ClusterPlacement,
        Crossing as Crossing,
        StagePlace as StagePlace,
    )
    from memo.mip.cluster.stage_problem import (
        ProfileOf as ProfileOf,
        balanced_layers as balanced_layers,
        communication as communication,
        problem_inputs as problem_inputs,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__)
