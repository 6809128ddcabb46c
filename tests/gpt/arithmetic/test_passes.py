"""Bytes of a layer's element-wise passes, and its kernels, against the operators that memo's GPT runs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from memo.allocator import BytelessMode
from memo.gpt import GPTConfig, Precision, preset
from memo.gpt.arithmetic import derive_profile
from memo.gpt.arithmetic.block_bytes import BlockFigures, ElementSizes
from memo.gpt.arithmetic.layout import StepLayout
from memo.gpt.model.model import Block
from memo.gpt.model.rotary import rotary_tables
from memo.mip.inputs import hardware_preset
from memo.swap import work_of
from memo.torch_private import TorchDispatchMode

TOKENS = 1 << 16
PRODUCTS = frozenset({"mm", "addmm", "bmm", "linear"})
GPT2 = preset("350m", max_seq=TOKENS)


class Passes(TorchDispatchMode):
    """Bytes of element-wise operators, and kernels, of the phase that runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "forward"
        self.nbytes: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name, work = func.overloadpacket.__name__, work_of(func, args, kwargs or {}, out)
        self.kernels[self.phase] += work.nbytes > 0
        if name not in PRODUCTS and "attention" not in name:
            self.nbytes[self.phase] += work.nbytes
        return out


def counted(config: GPTConfig, precision: Precision) -> Passes:
    dtype = torch.bfloat16 if precision is Precision.BF16 else torch.float32
    with BytelessMode():
        layer = Block(config).to(dtype)
        x = torch.zeros(1, TOKENS, config.hidden, dtype=dtype, requires_grad=True)
        device, rotary = torch.device("cpu"), None
        if config.positions == "rotary":
            rotary = rotary_tables(TOKENS, config.head_dim, config.rope_theta, device=device, dtype=dtype)
        gradient = torch.zeros_like(x)
        casts = precision is Precision.BF16_AUTOCAST
        with Passes() as passes:
            with torch.autocast("cpu", dtype=torch.bfloat16) if casts else contextlib.nullcontext():
                result = layer(x, rotary)
            passes.phase = "backward"
            result.backward(gradient)
    return passes


# RMSNorm is one kernel on a GPU and many operators on a CPU, so norms are layer norms here.
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"positions": "rotary", "bias": False},
        {"mlp": "swiglu", "kv_heads": 4},
        {"mlp": "swiglu", "positions": "rotary", "bias": False, "kv_heads": 4},
    ],
    ids=str,
)
def test_passes_and_kernels_are_those_that_the_layer_runs(changes: dict[str, Any], precision: Precision) -> None:
    config = dataclasses.replace(GPT2, **changes)
    block, passes = BlockFigures(config, TOKENS, ElementSizes.of(precision)).block(), counted(config, precision)
    # What is left out is casts of weights, which do not grow with the tokens, and rotary tables.
    assert block.elementwise * TOKENS == pytest.approx(passes.nbytes["forward"], rel=0.02)
    assert block.elementwise_backward * TOKENS == pytest.approx(passes.nbytes["backward"], rel=0.02)
    assert block.kernels == (passes.kernels["forward"], passes.kernels["backward"])


def test_a_layer_takes_no_less_than_its_launches() -> None:
    machine = hardware_preset("h100")
    (layer,) = derive_profile(GPT2, machine, StepLayout(tokens=16)).classes
    assert layer.forward_s == 10 * machine.launch_s
    assert layer.backward_s == 19 * machine.launch_s
