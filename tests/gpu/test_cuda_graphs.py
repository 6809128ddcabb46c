"""A manager beside CUDA graphs: a step that is captured stays on the device, one that was captured before is left alone."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stream_programs import Block, Blocks, batch

import memo

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]


@pytest.fixture(autouse=True)
def _captures() -> None:
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device="cuda").add_(1)
    except RuntimeError as error:
        pytest.skip(f"no capture on this device: {str(error).splitlines()[0]}")


def model(make: Any = lambda: Block(64)) -> Blocks:
    torch.manual_seed(0)
    return Blocks(make).cuda()


def gradients(of: Blocks) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in of.parameters() if parameter.grad is not None]


def captured(of: Blocks, manager: Any) -> list[torch.Tensor]:
    """Gradients of a step that is warmed up, captured as a whole, and replayed with another batch."""
    x, side = batch(0), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            of.zero_grad(set_to_none=True)
            with manager or contextlib.nullcontext():
                loss = of(x)
            loss.backward()
    torch.cuda.current_stream().wait_stream(side)
    of.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with manager or contextlib.nullcontext():
            loss = of(x)
        loss.backward()
    with torch.no_grad():
        x.copy_(batch(1))
    graph.replay()
    torch.cuda.synchronize()
    return gradients(of)


def test_a_captured_step_keeps_its_tensors_and_replays_right() -> None:
    want = captured(model(), None)
    ours = model()
    manager = memo.offload(ours, alpha=1.0, host="64MiB", min_bytes=512)
    with pytest.warns(RuntimeWarning, match="CUDA graph is being captured"):
        got = captured(ours, manager)
    assert manager.stats.bytes_host > 0  # the warm-up moved
    assert all(map(torch.equal, got, want))
    manager.close()


def trained(of: Blocks, managed: bool) -> list[torch.Tensor]:
    """Gradients of four steps."""
    manager = memo.offload(of, alpha=1.0, host="64MiB", min_bytes=512) if managed else None
    done = []
    for step in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        of.zero_grad(set_to_none=True)
        with manager or contextlib.nullcontext():
            loss = of(batch(step))
        loss.backward()
        torch.cuda.synchronize()
        done += gradients(of)
    if manager is not None:
        manager.close()
    return done


def graphed() -> Blocks:
    gc.collect()  # a graph that goes away while another is captured ends the capture
    of = model()
    layers = torch.cuda.make_graphed_callables(tuple(of.layers), tuple((batch(0),) for _ in of.layers))
    of.layers = torch.nn.ModuleList(layers)
    return of


def compiled() -> Blocks:
    pytest.importorskip("triton")
    of = model()
    for layer in of.layers:
        layer.compile(mode="reduce-overhead")
    return of


@pytest.mark.parametrize("make", [graphed, compiled])
def test_layers_that_replay_graphs_train_under_a_manager(make: Callable[[], Blocks]) -> None:
    want = trained(make(), managed=False)
    assert all(map(torch.equal, trained(make(), managed=False), want))
    assert all(map(torch.equal, trained(make(), managed=True), want))
