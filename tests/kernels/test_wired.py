"""The kernels where the swap engine uses them: gradients are those of the references, and each is really launched."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from small_models import Stack, Step, assert_equal, ids, train
from torch import nn

from memo.kernels import Codec, codec as codecs, masks
from memo.manager import Manager
from memo.swap import Engine, Level, RecomputePolicy, find_layers
from memo.swap.backends import CpuBackend, CudaBackend
from memo.swap.tiers import HostTier


class Mixed(nn.Module):
    """A layer with a norm, an activation, two saved products and a dropout, without attention, whose backward adds by
    atomics on a GPU."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Launches:
    """Counts the launches of two modules of kernels, and sends tensors of any device to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, on: bool) -> None:
        self.names: list[str] = []
        for module in (codecs, masks):
            monkeypatch.setattr(module, "on_triton", lambda _: on)
        if not on:
            return
        from memo.kernels import codec_triton, masks_triton

        for module, name in ((codec_triton, "encode"), (codec_triton, "decode")):
            monkeypatch.setattr(module, name, self._counting(name, getattr(module, name)))
        for module, name in ((masks_triton, "pack"), (masks_triton, "unpack")):
            monkeypatch.setattr(module, name, self._counting(f"{name} mask", getattr(module, name)))

    def _counting(self, name: str, launch: Any) -> Any:
        def counted(*args: Any) -> Any:
            self.names.append(name)
            return launch(*args)

        return counted


def model_on(device: torch.device) -> Stack:
    torch.manual_seed(0)
    return Stack(layers=3, make=Mixed).to(device)


def managed(model: Stack, device: torch.device, codec: Codec | None) -> Manager:
    """With a codec everything moves, as codes; without one masks are kept as bits and the rest is recomputed."""
    backend = CpuBackend() if device.type == "cpu" else CudaBackend(device)
    engine = Engine(backend, [HostTier(backend, 1 << 24, segment_bytes=1 << 20)], min_bytes=512, codec=codec)
    level = Level.SAVE_ATTENTION if codec is None else Level.SAVE_ALL
    return Manager(model, find_layers(model), engine, recompute_policy=RecomputePolicy(engine, level))


def steps(device: torch.device, *, with_memo: bool, codec: Codec | None = None) -> list[Step]:
    model = model_on(device)
    manager = managed(model, device, codec) if with_memo else None
    torch.manual_seed(1)
    done = train(model, lambda step: model(ids(step).to(device)), manager, steps=2)
    if manager is not None:
        assert (manager.stats.bytes_recomputed > 0) == (codec is None)
        manager.close()
    return done


@pytest.mark.gpu
@pytest.mark.parametrize(("codec", "names"), [(None, {"pack mask", "unpack mask"}), (Codec.INT8, {"encode", "decode"})])
def test_a_run_with_kernels_equals_the_run_with_references_bit_for_bit(
    codec: Codec | None, names: set[str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        Launches(patched, on=False)
        want = steps(device, with_memo=True, codec=codec)
    launches = Launches(monkeypatch, on=True)
    assert_equal(steps(device, with_memo=True, codec=codec), want)
    assert set(launches.names) == names
    if device.type == "cpu" and codec is None:
        assert_equal(want, steps(device, with_memo=False))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the kernels are triton's")
def test_a_cpu_never_asks_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from memo.kernels import codec_triton

    monkeypatch.setattr(codec_triton, "encode", None)
    steps(torch.device("cpu"), with_memo=True, codec=Codec.INT8)
