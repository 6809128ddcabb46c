"""Overlapped tensor parallelism: collectives are launched before the other half's products, and rows keep their bits."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))

from launching import launch

from memo.gpt import preset
from memo.gpt.model.build_rank import build_stages
from memo.parallel import Layout, World

SEQ, HIDDEN = 64, 32
SHAPE = preset("tiny", vocab_size=61, max_seq=SEQ, layers=1, hidden=HIDDEN, heads=4)
BOUNDS = {"torch.float32": 2.0**-19, "torch.float64": 2.0**-48, "torch.bfloat16": 2.0**-6}
"""Of gradients of weights, which are sums of two halves': a few roundings of their largest entry."""


class Order(TorchDispatchMode):
    """Collectives and products as they come: `launch`, `wait`, `product`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, int]] = []
        self._launched: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "_c10d_functional::wait_tensor":
            self.seen.append(("wait", self._launched[args[0].data_ptr()]))
        elif name.startswith("_c10d_functional::"):
            self._launched[out.data_ptr()] = number = sum(kind == "launch" for kind, _ in self.seen)
            self.seen.append(("launch", number))
        elif name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear"):
            self.seen.append(("product", -1))
        return out

    def exposed(self) -> tuple[int, list[int]]:
        """Number of collectives, and those that no product was issued beside."""
        launched = [number for kind, number in self.seen if kind == "launch"]
        between = {n: self.seen[self.seen.index(("launch", n)) : self.seen.index(("wait", n))] for n in launched}
        return len(launched), [n for n, beside in between.items() if ("product", -1) not in beside]


def passes(rows: int, *, sequence: bool) -> tuple[Order, Order]:
    """The two passes of an overlapped layer on one rank of two."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        world = World.of(Layout(tp=2, tp_overlap=True, sequence_parallel=sequence), "cpu")
        device, dtype = torch.device("cpu"), torch.float32
        (stage,) = build_stages(SHAPE, world, seq=SEQ, device=device, dtype=dtype, seed=0)
        (layer,) = stage.layers.values()
        x = torch.randn(rows, SEQ // 2 if sequence else SEQ, HIDDEN, requires_grad=True)
        with Order() as forward:
            out = layer(x)
        with Order() as backward:
            out.sum().backward()
    finally:
        dist.destroy_process_group()
    return forward, backward


def test_every_collective_but_the_first_and_the_last_has_a_product_beside_it() -> None:
    forward, backward = passes(2, sequence=True)
    assert forward.exposed() == (8, [0, 7])
    # Two halves' gathers of gradients and sums, and four repeated gathers. The first gather of the half that comes first
    # has nothing before it, the last sum nothing after it.
    assert backward.exposed() == (12, [0, 11])


def test_without_sequence_parallelism_the_last_sum_alone_is_exposed() -> None:
    forward, backward = passes(3, sequence=False)
    assert forward.exposed() == (4, [3])
    assert backward.exposed() == (4, [3])


def test_of_one_sequence_the_mlp_overlaps() -> None:
    forward, backward = passes(1, sequence=True)
    assert forward.exposed() == (4, [0, 3])  # attention's own two are waited for
    assert backward.exposed() == (6, [0, 5])


@pytest.mark.parametrize("kind", ["sequence", pytest.param("whole", marks=pytest.mark.parallel)])
def test_halves_have_the_bits_of_the_whole_but_in_gradients_of_weights(kind: str) -> None:
    told = launch(2, "overlap_worker.py", kind, "1", "2", "3")
    for dtype, bound in BOUNDS.items():
        for rows in (1, 2, 3):
            found = re.search(rf"{dtype} {rows}: output 0, input's gradient 0, gradients of weights (\S+)", told)
            assert found, told
            assert float(found[1]) < bound, told


@pytest.mark.parallel
def test_no_result_is_read_and_no_input_changed_before_the_wait() -> None:
    names = ["tp2_overlap_float64", "tp2_overlap_replicated_llama_float64"]
    told = launch(2, "late_worker.py", "0,0.5,1", *names)
    for name in names:
        assert f"equal {name} within" in told, told
