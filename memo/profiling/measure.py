"""Measures a profile: what each layer of a model saves at each level and how long it takes, in steps that run for real.

Three things are run: a few steps under `memo.offload` with a third of the tokens at each level, which is the configuration
with the least on the device and tells bytes and recompute times; a few plain steps under a clock; and one step without
memory, which tells what stands on the device besides what is saved. Needs room for one plain step.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from memo.autoplan import classes_of, levels_of, mlp_tiles_of
from memo.errors import UsageError
from memo.manager import offload
from memo.mip.inputs import EndProfile, LayerProfile, Level, Profile, Role, Signature
from memo.profiling.layer_flops import Flops, forward_flops, repeated_flops
from memo.profiling.layer_timer import ClockedStep, time_step
from memo.profiling.saved_storages import saved_storages
from memo.profiling.transient_memory import TransientMemory, transients_of
from memo.record import Step
from memo.swap import Layer, LayerCosts, Level as SwapLevel, comparing_nbytes, find_layers

__all__ = ["profile"]

THIRDS = (1 / 3, 1 / 3, 1 / 3)


def profile(
    build: Callable[[], Step],
    *,
    name: str,
    batch: int,
    tokens: int,
    repeats: int = 3,
    disk: str | Path | None = None,
    device: torch.device | None = None,
) -> Profile:
    """The profile of one microbatch on this machine.

    Args:
        build: returns a `Step`. Called twice: on tensors without bytes, to count transient bytes, then for real.
        name: what the profile calls the model.
        batch, tokens: the step's shape; attention is taken to be causal.
        repeats: steps of each kind; the shortest times count.
        disk: directory for what moves while levels are measured; the system's temporary one by default.

    Raises:
        UsageError: layers that run more than once a step, or not at all.
    """
    transients = transients_of(build)
    step = build()
    layers = find_layers(step.model)
    where = next(step.model.parameters()).device if device is None else device
    costs, storages = _costs(step, tokens=tokens, repeats=repeats, disk=disk)
    again = repeated_flops(step, disk=disk)
    modules = [layer.module for layer in layers]
    step.loss().backward()  # the first plain step is slower than those that follow
    try:
        times = ClockedStep.least([time_step(step.loss, modules, where) for _ in range(repeats)])
    except KeyError as error:
        raise UsageError(f"profile: {error} is missing: every layer has to run exactly once a step") from None
    flops, whole = forward_flops(step, layers)
    optimizer_s, state_bytes = _optimizer(step, where)
    # The last layer's backward follows its forward at once, and it repeats nothing.
    share = again / (sum(flop.whole - flop.attention for flop in flops[:-1]) or 1.0)
    found = _Found(costs, storages, times, flops, transients, state_bytes, share)
    classes, names = classes_of([_layer(layer, number, found) for number, layer in enumerate(layers)])
    inside = {parameter for module in modules for parameter in module.parameters()}
    outside = sum(_bytes(parameter) for parameter in step.model.parameters() if parameter not in inside)
    a_token = whole.whole / (batch * tokens)
    dtype = str(next(step.model.parameters()).dtype).removeprefix("torch.")
    return Profile(
        signature=Signature(model=name, batch=batch, tokens=tokens, dtype=dtype),
        role=Role.MEASURED,
        classes=classes,
        layers=names,
        embedding=EndProfile(
            forward_s=max(times.before_forward_s, 0.0),
            backward_s=max(times.before_backward_s, 0.0),
            saved_bytes=transients.saved_outside,
        ),
        head=EndProfile(
            forward_s=max(times.behind_forward_s, 0.0),
            backward_s=max(times.behind_backward_s, 0.0),
            forward_flops=max(whole.whole - sum(flop.whole for flop in flops), 0.0),
            transient_bytes=transients.outside,
            static_bytes=round(outside * state_bytes),
        ),
        optimizer_s=optimizer_s,
        mlp_tiles=mlp_tiles_of(modules),
        model_flops_causal_per_token=3 * a_token,
        model_flops_full_per_token=3 * (a_token + whole.attention / (batch * tokens)),
    )


# What runs.


def _costs(
    step: Step, *, tokens: int, repeats: int, disk: str | Path | None
) -> tuple[list[LayerCosts], list[list[int]]]:
    """Bytes and recompute times of each layer, from steps under the engine; and the sizes of its storages.

    Where a layer cannot repeat a part of its tokens, all that is known is what it saves.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # layers that move whole say so; here the profile tells
        manager = offload(step.model, alpha=THIRDS, min_bytes=0, disk=disk)
        try:
            for _ in range(repeats + 1):
                with manager:
                    loss = step.loss()
                loss.backward()
                manager.step_done()
            known = {cost.layer: cost for cost in manager.levels_profile()}
        finally:
            manager.close()
    whole = saved_storages(step.loss, manager.layers)
    costs = [
        known.get(layer.name) or _only_whole(layer.name, sum(whole[layer.name]), tokens) for layer in manager.layers
    ]
    return costs, list(whole.values())


def _only_whole(layer: str, nbytes: int, tokens: int) -> LayerCosts:
    return LayerCosts(
        layer=layer,
        tokens=tokens,
        input_bytes=0,
        always_bytes=0,
        bytes_per_token={SwapLevel.SAVE_ALL: nbytes / tokens},
        recompute_s_per_token={},
    )


def _optimizer(step: Step, device: torch.device) -> tuple[float, float]:
    """Seconds of AdamW's second step, and bytes of weight, gradient and state for each byte of weight."""
    adam = torch.optim.AdamW(step.model.parameters(), lr=0.0, weight_decay=0.0)
    took = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        adam.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took = time.perf_counter() - begin
    weights = sum(_bytes(parameter) for parameter in step.model.parameters())
    state = sum(
        _bytes(value)
        for entry in adam.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor) and value.ndim
    )
    step.model.zero_grad(set_to_none=True)
    return took, 2.0 + state / weights


# From numbers to a profile.


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """All that was measured."""

    costs: Sequence[LayerCosts]
    storages: Sequence[Sequence[int]]
    times: ClockedStep
    flops: Sequence[Flops]
    transients: TransientMemory
    state_bytes: float
    """Of weight, gradient and optimizer, for a byte of weight."""
    repeated: float
    """Of forward's matrix products, the part that level SAVE_ATTENTION repeats."""


def _layer(layer: Layer, number: int, found: _Found) -> LayerProfile:
    costs, flop, forward_s = found.costs[number], found.flops[number], found.times.forward_s[number]
    weights = sum(_bytes(parameter) for parameter in layer.module.parameters())
    repeated = (flop.whole - flop.attention) * found.repeated
    levels, storages = levels_of(costs), found.storages[number]
    return LayerProfile(
        name=type(layer.module).__name__,
        always_bytes=costs.always_bytes,
        levels=tuple(
            dataclasses.replace(known, recompute_flops=repeated) if known.level is Level.SAVE_ATTENTION else known
            for known in levels
        ),
        forward_s=forward_s,
        backward_s=found.times.backward_s[number],
        forward_flops=flop.whole,
        backward_flops=2 * flop.whole,
        attention_flops=flop.attention,
        attention_s=forward_s * flop.attention / flop.whole if flop.whole else 0.0,
        # At the end of a layer's first forward its recompute is tried out, and compared with what was saved.
        forward_transient_bytes=found.transients.forward.get(layer.name, 0)
        + (comparing_nbytes(max(storages, default=0)) if len(levels) > 1 else 0),
        backward_transient_bytes=found.transients.backward.get(layer.name, 0),
        static_bytes=round(weights * found.state_bytes),
        # A recompute is given results of attention's two projections, too, which autograd need not save.
        storages=len(storages) + (2 if len(levels) > 1 else 0),
        largest_storage_bytes=max(storages, default=0),
    )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
