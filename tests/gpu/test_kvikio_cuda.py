"""GdsDisk over the real kvikio, in compatibility mode where GPUDirect Storage is missing, as on the emulated device."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks import gpu_smoke
from memo.errors import ScratchUnusable
from memo.swap.backends.cuda import CudaBackend, copy_stream
from memo.swap.disk import GdsDisk

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu
pytest.importorskip("kvikio")
DEVICE = torch.device("cuda", 0)
MIB = 1 << 20


def test_bytes_come_back_from_two_folders(tmp_path: Path) -> None:
    """Tensors of any size are written in stripes after the stream that fills them, and read back."""
    chance, backend = random.Random(0), CudaBackend(DEVICE)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    disk = GdsDisk(
        folders,
        64 * MIB,
        new_stream=lambda: copy_stream(DEVICE),
        block_bytes=MIB,
        kvikio=gpu_smoke.blocking_kvikio(),
    )
    for nbytes in (1, 4095, 4096, MIB + 1, 5 * MIB, *(chance.randrange(1, 6 * MIB) for _ in range(6))):
        want = torch.randint(0, 256, (nbytes,), dtype=torch.uint8).pin_memory()
        source = want.to(DEVICE, non_blocking=True)
        extent = disk.reserve(nbytes)
        assert extent is not None
        disk.write(extent, source, after=(backend.compute_event(),)).synchronize()
        source.zero_()
        target = torch.empty_like(source)
        disk.read(extent, target, after=(backend.compute_event(),)).synchronize()
        assert torch.equal(target.cpu(), want)
        disk.release(extent)
    disk.close()


def test_a_training_step_is_bit_equal_by_kvikio() -> None:
    assert "gradients equal" in gpu_smoke.gds(DEVICE)


def test_transfers_that_block_are_refused(tmp_path: Path) -> None:
    """GdsDisk refuses kvikio where it would run in compatibility mode."""
    import kvikio.defaults

    with (
        kvikio.defaults.set("compat_mode", kvikio.CompatMode.ON),
        pytest.raises(ScratchUnusable, match="would not use"),
    ):
        GdsDisk([tmp_path], MIB, new_stream=lambda: copy_stream(DEVICE))
