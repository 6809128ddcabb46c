"""The kernels behind a ring take what they are given, also the one of a GPU that is not there; what none takes is refused.

Results are held against one process in test_equality, and on GPUs in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs
from torch.testing._internal.distributed.fake_pg import FakeStore

from memo.parallel import Ring, ring_attention

SHAPE, KV_SHAPE = (2, 64, 4, 16), (2, 64, 2, 16)


@pytest.fixture(autouse=True)
def _two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


def the_ring() -> Ring:
    assert dist.group.WORLD is not None
    return Ring(dist.group.WORLD)


def inputs(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.empty(shape, device=device, dtype=dtype, requires_grad=True) for shape in (SHAPE, KV_SHAPE, KV_SHAPE)]


def test_the_flash_kernel_of_gpus_has_the_arguments_it_is_called_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_attention, "_kernel", lambda query: ring_attention._CUDA)
    given = inputs("meta", torch.bfloat16)
    out = the_ring()(*given)
    grads = torch.autograd.grad(out, given, torch.empty_like(out))
    assert (out.shape, out.dtype) == (SHAPE, torch.bfloat16)
    assert [grad.shape for grad in grads] == [SHAPE, KV_SHAPE, KV_SHAPE]


def test_what_others_set_for_torchs_rings_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchs._cp_options, "enable_load_balance", False)
    monkeypatch.setattr(torchs._cp_options, "rotate_method", torchs._RotateMethod.ALL_GATHER)
    seen = []
    original = torchs._templated_ring_attention

    def noting(*args: object, **kwargs: object) -> object:
        seen.append((torchs._cp_options.enable_load_balance, torchs._cp_options.rotate_method))
        return original(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torchs, "_templated_ring_attention", noting)
    the_ring()(*inputs("cpu", torch.float32))
    assert seen == [(True, torchs._RotateMethod.ALL_TO_ALL)]
    assert not torchs._cp_options.enable_load_balance
    assert torchs._cp_options.rotate_method is torchs._RotateMethod.ALL_GATHER
