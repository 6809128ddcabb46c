"""Process group of a run, its device mesh, and this rank's coordinates in it."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memo.parallel.layout import Layout
from memo.parallel.store import meeting_store

# Timeout of collectives, for a peer that hangs. One that died is detected at once, by its closed connection (gloo) or by
# torchrun.
TIMEOUT = datetime.timedelta(minutes=10)

_PATIENCE_S = 5.0

MeshDim = Literal["pp", "dp", "cp", "tp"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The device mesh as one rank sees it: its coordinates and the submeshes it belongs to."""

    layout: Layout
    mesh: DeviceMesh
    replicas: DeviceMesh
    """dp and cp flattened: ranks with the same parameters and different tokens."""
    token_ranks: DeviceMesh
    """dp, cp, and tp where its ranks hold different tokens; learned positions are sharded over these."""
    layer_ranks: DeviceMesh
    """cp and tp flattened: ranks that communicate within a layer, and must treat its activations in the same way."""
    expert_ranks: DeviceMesh | None
    """Ranks that divide the experts; None without expert parallelism."""
    expert_replicas: DeviceMesh | None
    """Ranks with the same experts and different tokens; None without expert parallelism."""
    rank: int
    pp: int
    dp: int
    cp: int
    tp: int

    @classmethod
    def of(cls, layout: Layout, device_type: str) -> World:
        """Builds the mesh. A collective call."""
        sizes = (layout.pp, layout.dp, layout.cp, layout.tp)
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=get_args(MeshDim))
        replicas = mesh["dp", "cp"]._flatten("dp_cp")
        token_ranks = mesh["dp", "cp", "tp"]._flatten("dp_cp_tp") if layout.shards_tokens else replicas
        divided = None
        if layout.ep > 1:
            divided = mesh._unflatten("dp", (layout.dp // layout.ep, layout.ep), ("dp_outer", "ep"))
        same = ("dp_outer", "cp", "tp") if layout.shards_tokens else ("dp_outer", "cp")
        place = {name: mesh.get_local_rank(name) for name in get_args(MeshDim)}
        return cls(
            layout=layout,
            mesh=mesh,
            replicas=replicas,
            token_ranks=token_ranks,
            layer_ranks=mesh["cp", "tp"]._flatten("cp_tp"),
            expert_ranks=None if divided is None else divided["ep"],
            expert_replicas=None if divided is None else divided[same]._flatten("_".join(same)),
            rank=dist.get_rank(),
            **place,
        )

    def group(self, dimension: MeshDim) -> dist.ProcessGroup:
        """Process group of this rank along a mesh dimension."""
        return self.mesh.get_group(dimension)

    @property
    def token_shard(self) -> int:
        """Index of this rank's shard among the layout's token shards."""
        return self.cp * self.layout.tp + self.tp if self.layout.shards_tokens else self.cp


@contextlib.contextmanager
def join(device: torch.device) -> Iterator[None]:
    """Initialises the default process group for the block (gloo; NCCL for CUDA), from torchrun's environment."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = meeting_store(timeout=TIMEOUT, serve=True)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    try:
        yield
        # Not after an error: it may wait for ranks that are gone. The process exits, which closes its connections.
        dist.destroy_process_group()
    finally:
        _let_gloo_finish()


def _let_gloo_finish() -> None:
    """Waits until gloo's threads have released the tensors that they sent or received.

    Releasing one takes the GIL, and a thread that requests it while the interpreter shuts down aborts the process. The
    threads end with their group, but references in torch (DTensor's caches, collectives under a dispatch mode) may keep the
    group alive. A thread with nothing to do sleeps.
    """
    asleep, deadline = 0, time.monotonic() + _PATIENCE_S
    while asleep < 2 and time.monotonic() < deadline:
        time.sleep(0.005)  # releases the GIL
        asleep = asleep + 1 if _gloo_sleeps() else 0


def _gloo_sleeps() -> bool:
    for task in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            name, state = task.read_text().partition("(")[2].rsplit(") ", 1)
            if name == "pt_gloo_runloop" and not state.startswith("S"):
                return False
    return True
