"""Derived cost of each step of a tape, from shapes alone; a tape holds no tensor, so stand-ins without bytes serve."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from memo.lru import LRU
from memo.swap.recompute.tape.log import Function
from memo.swap.recompute.tape.tape import Carried, ContentUse, Hidden, Tape, TapeStep
from memo.swap.recompute.tape.work import Rates, Work, picoseconds_of, rates_of, work_of

_KNOWN: LRU[tuple[str | Rates, tuple[Any, ...]], int] = LRU(8192)
"""Layers repeat, and so do their operators; a call that takes another path has few new ones."""


def step_costs(tape: Tape, device: str | Rates) -> list[int]:
    """Picoseconds of repeating each step on a device of that type, or with these rates."""
    stand_ins: dict[int, torch.Tensor] = {}

    def stand_in(value: Any) -> Any:
        if isinstance(value, ContentUse):
            known = stand_ins.get(value.value)
            if known is None:
                _, _, size, stride, dtype = tape.geometry(value.value)
                known = stand_ins[value.value] = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            return known
        if isinstance(value, list):
            return [stand_in(item) for item in value]
        if isinstance(value, Carried):
            return 0.5
        return None if isinstance(value, Hidden) else value

    def cost(step: TapeStep) -> int:
        key = (step.operator, *(_shape(tape, value) for value in (*step.args, *step.kwargs.values())))
        known = _KNOWN.get((device, key))
        if known is None:
            known = _KNOWN[device, key] = derived(step)
        return known

    def derived(step: TapeStep) -> int:
        written = sum(tape.storage(content)[1] for content in step.makes)
        work = Work(flops=0, nbytes=2 * written)
        dtype = torch.float32
        if step.makes and not isinstance(step.operator, Function):
            out = stand_in(step.out)
            kwargs = {name: stand_in(value) for name, value in step.kwargs.items()}
            # What a step is given may be hidden, or new to a formula: a wrong estimate costs time, an error a training.
            with contextlib.suppress(Exception):
                work = work_of(step.operator.func, [stand_in(value) for value in step.args], kwargs, out)
            made = out if isinstance(out, list) else [out]  # of attention the result comes before its statistics
            dtype = next((one.dtype for one in made if isinstance(one, torch.Tensor)), dtype)
        return picoseconds_of(work, device if isinstance(device, Rates) else rates_of(device, dtype))

    return [cost(step) if step.makes else 1 for step in tape.steps]


def _shape(tape: Tape, value: Any) -> Any:
    if isinstance(value, ContentUse):
        return tape.geometry(value.value)[2:]
    if isinstance(value, list):
        return tuple(_shape(tape, item) for item in value)
    return None if isinstance(value, (Carried, Hidden)) else value
