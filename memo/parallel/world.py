"""The processes of a run: joins them, arranges them as a mesh, and knows this one's place in it.

Owns the process group and the names of the mesh's dimensions. Does not own what is done on them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memo.parallel.layout import Layout
from memo.parallel.store import meeting_store

__all__ = ["World", "join"]

# A rank that waits this long for another gives up. A peer that died is seen at once, by its closed connection (gloo) or by
# torchrun; this is for one that hangs.
TIMEOUT = datetime.timedelta(minutes=10)

_PATIENCE_S = 5.0

_NAMES = ("pp", "dp", "cp", "tp")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One rank's view of all of them."""

    layout: Layout
    mesh: DeviceMesh
    replicas: DeviceMesh
    """dp and cp in one dimension: ranks that hold the same layers' matrices and other tokens."""
    token_ranks: DeviceMesh
    """And tp too, where its ranks hold other tokens: learned positions are sharded over these."""
    layer_ranks: DeviceMesh
    """cp and tp: ranks that talk within a layer, and must treat its activations alike."""
    rank: int
    pp: int
    dp: int
    cp: int
    tp: int

    @classmethod
    def of(cls, layout: Layout, device_type: str) -> World:
        """A collective call: every rank makes it."""
        sizes = (layout.pp, layout.dp, layout.cp, layout.tp)
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=_NAMES)
        replicas = mesh["dp", "cp"]._flatten("dp_cp")
        token_ranks = mesh["dp", "cp", "tp"]._flatten("dp_cp_tp") if layout.shards_tokens else replicas
        place = {name: mesh.get_local_rank(name) for name in _NAMES}
        return cls(
            layout=layout,
            mesh=mesh,
            replicas=replicas,
            token_ranks=token_ranks,
            layer_ranks=mesh["cp", "tp"]._flatten("cp_tp"),
            rank=dist.get_rank(),
            **place,
        )

    def group(self, dimension: str) -> dist.ProcessGroup:
        return self.mesh.get_group(dimension)

    @property
    def token_shard(self) -> int:
        """Which of the layout's token shards this rank holds."""
        return self.cp * self.layout.tp + self.tp if self.layout.shards_tokens else self.cp


@contextlib.contextmanager
def join(device: torch.device) -> Iterator[None]:
    """The process group, for as long as the block runs."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = meeting_store(timeout=TIMEOUT, serve=True)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    try:
        yield
        # Not after an error: it may wait for ranks that are gone. The process ends, and its connections with it.
        dist.destroy_process_group()
    finally:
        _let_gloo_finish()


def _let_gloo_finish() -> None:
    """Waits for gloo's threads to let go of the tensors that they sent or received.

    To let go of one they need the interpreter, and a thread that asks for it while the interpreter ends aborts the
    process. The threads end with their group, but torch may know the group for longer than we do: caches of DTensor do,
    and collectives under a dispatch mode. A thread with nothing to do sleeps.
    """
    asleep, deadline = 0, time.monotonic() + _PATIENCE_S
    while asleep < 2 and time.monotonic() < deadline:
        time.sleep(0.005)  # leaves them the interpreter
        asleep = asleep + 1 if _gloo_sleeps() else 0


def _gloo_sleeps() -> bool:
    for task in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            name, state = task.read_text().partition("(")[2].rsplit(") ", 1)
            if name == "pt_gloo_runloop" and not state.startswith("S"):
                return False
    return True
