"""Models whose parameters wait on the host while a GPU computes: FSDP's CPU offload, seen without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from memo.manager import Machine
from memo.manager.resources import TierBudgets, device_of, offloaded_training_bytes

GPU = torch.device("cuda", 0)


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """A mesh of two GPUs that are not there."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield DeviceMesh("cuda", [0, 1], _init_backend=False)
    finally:
        dist.destroy_process_group()


def sharded_on_host(mesh: DeviceMesh) -> nn.Module:
    """A layer whose weight's shard of 64 of 128 values is on the host, as `fully_shard` with CPUOffloadPolicy leaves it."""
    whole = torch.zeros(8, 16)
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    shard = DTensor(torch.zeros(4, 16), DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=True)  # type: ignore[call-arg]
    layer = nn.Linear(16, 8, bias=False)
    layer.weight = nn.Parameter(shard)
    return layer


def test_shards_on_the_host_are_computed_on_the_gpu_of_their_mesh(mesh: DeviceMesh) -> None:
    layer = sharded_on_host(mesh)
    assert {parameter.device.type for parameter in layer.parameters()} == {"cpu"}
    assert device_of(layer) == GPU
    assert device_of(nn.Linear(1, 1)) == torch.device("cpu")


def test_fsdp_1_says_itself_where_it_computes() -> None:
    layer = nn.Linear(1, 1)
    layer.compute_device = GPU
    assert device_of(nn.Sequential(layer)) == GPU


def test_the_host_s_own_budget_leaves_room_for_gradients_and_moments_there(mesh: DeviceMesh) -> None:
    class Large(Machine):
        host_is_device = False

        def free_host_bytes(self) -> int:
            return 10_000

    layer = sharded_on_host(mesh)
    needed = offloaded_training_bytes(layer, GPU)
    assert needed == 3 * 4 * 16 * 4
    layer.requires_grad_(False)
    assert offloaded_training_bytes(layer, GPU) == 0
    assert offloaded_training_bytes(nn.Linear(4, 4), torch.device("cpu")) == 0

    def host_bytes(host: int | str) -> int:
        machine, share = Large(torch.device("cpu")), lambda nbytes, weight: nbytes
        room = TierBudgets.of(
            machine, host=host, host_pool=None, disk=None, disk_budget=None, share=share, reserved_bytes=needed
        )
        return room.host_bytes

    assert host_bytes("auto") == 7_000 - needed
    assert host_bytes(5_000) == 5_000  # what was asked for
