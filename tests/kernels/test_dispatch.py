"""A GPU's work goes to Triton only where Triton works."""

from __future__ import annotations

import pytest
import torch

from memo.kernels import dispatch

masks_triton = pytest.importorskip("memo.kernels.masks_triton")


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_works", dispatch._works.__wrapped__)
    monkeypatch.setattr(torch, "ones", lambda *size, device: torch.full(size, 1.0))


def test_a_kernel_that_gives_the_right_bits_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks_triton, "pack", lambda mask: torch.tensor([255, 1], dtype=torch.uint8))
    assert dispatch._works()


def test_a_kernel_that_gives_other_bits_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks_triton, "pack", lambda mask: torch.tensor([255, 0], dtype=torch.uint8))
    assert not dispatch._works()


def test_a_machine_without_a_c_compiler_gets_a_warning_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(mask: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(masks_triton, "pack", fail)
    with pytest.warns(RuntimeWarning, match="Failed to find C compiler"):
        assert not dispatch._works()
