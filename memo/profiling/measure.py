"""`memo.profile`: bytes saved at each point and times of each layer, measured in real steps.

Runs a few steps under `memo.offload` that recompute all but attention, for bytes and recompute times; a few plain steps
under a timer; and one step on byteless tensors, for transient memory. The device needs room for one plain
step.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from memo.autoplan import classes_of, mlp_tiles_of, points_of
from memo.errors import UsageError
from memo.manager import offload
from memo.mip.inputs import (
    ALL,
    EmbeddingOrHeadProfile,
    LayerProfile,
    PointProfile,
    Profile,
    Role,
    Signature,
    StaticBytes,
)
from memo.profiling.layer_flops import Flops, forward_flops, repeated_flops
from memo.profiling.layer_timer import TimedStep, time_step
from memo.profiling.saved_storages import saved_storages
from memo.profiling.transient_memory import TransientMemory, transient_memory_of
from memo.record import Step
from memo.swap import Layer, LayerCosts, comparing_nbytes, find_layers


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
    """Measures the profile of a model on this machine: what each layer saves, and how long it runs.

    A profile is the input of `memo plan`. Runs about `2 * repeats + 6` steps of one microbatch.

    Args:
        build: Callable that returns a `memo.record.Step`: a model and a callable that returns its scalar loss. Called
            twice: on byteless tensors, to count transient bytes, then for real.
        name: Name of the model in the profile.
        batch: Sequences in the step's microbatch.
        tokens: Tokens of each sequence. Attention is counted as causal.
        repeats: Steps of each kind; the shortest time of each part counts. Default 3.
        disk: Directory for what is moved while levels are measured. Default None: as of `memo.offload`.
        device: Device to wait for when times are read. Default None: that of the model's first parameter.

    Returns:
        The profile of one microbatch: bytes, seconds and floating-point operations of each class of layers, of the
        embedding and of the head.

    Raises:
        UsageError: A layer does not run exactly once in a step.
        RecordError: The step cannot run on byteless tensors, since its shapes depend on data.
        NoRepeatedLayers: The model has no repeated layers.

    After any of them the model's weights are unchanged; it may hold gradients.

    Example:
        import memo
        import torch
        from memo.record import Step
        from torch import nn

        def build() -> Step:
            layer = nn.TransformerEncoderLayer(512, 8, batch_first=True)
            model = nn.Sequential(nn.Embedding(256, 512), nn.TransformerEncoder(layer, num_layers=4))
            ids = torch.zeros(1, 4096, dtype=torch.long)
            return Step(model=model, loss=lambda: model(ids).mean())

        profile = memo.profile(build, name="encoder", batch=1, tokens=4096)
    """
    transients = transient_memory_of(build)
    step = build()
    layers = find_layers(step.model)
    where = next(step.model.parameters()).device if device is None else device
    costs, storages = _costs(step, repeats=repeats, disk=disk)
    again = repeated_flops(step, disk=disk)
    modules = [layer.module for layer in layers]
    step.loss().backward()  # the first plain step is slower than those that follow
    try:
        times = TimedStep.least([time_step(step.loss, modules, where) for _ in range(repeats)])
    except KeyError as error:
        raise UsageError(f"profile: {error} is missing: each layer must run exactly once in a step") from None
    flops, whole = forward_flops(step, layers)
    optimizer_s, static = _optimizer(step, where)
    # The last layer recomputes nothing: its backward follows its forward at once.
    share = again / (sum(flop.whole - flop.attention for flop in flops[:-1]) or 1.0)
    measured = _Measured(costs, storages, times, flops, transients, static, share)
    classes, names = classes_of([_layer(layer, number, measured) for number, layer in enumerate(layers)])
    inside = {parameter for module in modules for parameter in module.parameters()}
    outside = sum((nbytes for parameter, nbytes in static.items() if parameter not in inside), StaticBytes())
    a_token = whole.whole / (batch * tokens)
    dtype = str(next(step.model.parameters()).dtype).removeprefix("torch.")
    return Profile(
        signature=Signature(model=name, batch=batch, tokens=tokens, dtype=dtype),
        role=Role.MEASURED,
        classes=classes,
        layers=names,
        embedding=EmbeddingOrHeadProfile(
            forward_s=max(times.embedding_forward_s, 0.0),
            backward_s=max(times.embedding_backward_s, 0.0),
            saved_bytes=transients.saved_outside,
        ),
        head=EmbeddingOrHeadProfile(
            forward_s=max(times.head_forward_s, 0.0),
            backward_s=max(times.head_backward_s, 0.0),
            forward_flops=max(whole.whole - sum(flop.whole for flop in flops), 0.0),
            transient_bytes=transients.outside,
            static=outside,
        ),
        optimizer_s=optimizer_s,
        mlp_tiles=mlp_tiles_of(modules),
        model_flops_causal_per_token=3 * a_token,
        model_flops_full_per_token=3 * (a_token + whole.attention / (batch * tokens)),
    )


# Measurements.


def _costs(step: Step, *, repeats: int, disk: str | Path | None) -> tuple[list[LayerCosts | None], list[list[int]]]:
    """Measures costs by point and sizes of storages of each layer, in steps under the engine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of layers that move whole tensors, as the profile shows
        manager = offload(step.model, alpha=0.0, min_bytes=0, disk=disk)
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
    return [known.get(layer.name) for layer in manager.layers], list(whole.values())


def _optimizer(step: Step, device: torch.device) -> tuple[float, dict[nn.Parameter, StaticBytes]]:
    """Seconds of AdamW's second step, and bytes of each parameter with its gradient and state, where it has them."""
    adam = torch.optim.AdamW(step.model.parameters(), lr=0.0, weight_decay=0.0)
    took = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        adam.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took = time.perf_counter() - begin
    static = {
        parameter: StaticBytes(
            weights=_bytes(parameter),
            gradients=0 if parameter.grad is None else _bytes(parameter.grad),
            optimizer=sum(
                _bytes(value)
                for value in adam.state[parameter].values()
                if isinstance(value, torch.Tensor) and value.ndim
            ),
        )
        for parameter in step.model.parameters()
    }
    step.model.zero_grad(set_to_none=True)
    return took, static


# Conversion to a profile.


@dataclasses.dataclass(frozen=True, slots=True)
class _Measured:
    """Measurements of all layers, in the order of the model."""

    costs: Sequence[LayerCosts | None]
    """None: a layer that cannot be recomputed."""
    storages: Sequence[Sequence[int]]
    times: TimedStep
    flops: Sequence[Flops]
    transients: TransientMemory
    static: Mapping[nn.Parameter, StaticBytes]
    """Bytes of each parameter, its gradient and its optimizer state; a frozen one has neither."""
    repeated: float
    """Fraction of the forward's matrix products that point `attention` recomputes."""


def _layer(layer: Layer, number: int, measured: _Measured) -> LayerProfile:
    costs, flop, forward_s = measured.costs[number], measured.flops[number], measured.times.forward_s[number]
    repeated = (flop.whole - flop.attention) * measured.repeated
    points, storages = () if costs is None else points_of(costs, again_flops=repeated), measured.storages[number]
    return LayerProfile(
        name=type(layer.module).__name__,
        always_bytes=0,
        points=points or (PointProfile(name=ALL, saved_bytes=sum(storages)),),
        forward_s=forward_s,
        backward_s=measured.times.backward_s[number],
        forward_flops=flop.whole,
        backward_flops=2 * flop.whole,
        attention_flops=flop.attention,
        attention_s=forward_s * flop.attention / flop.whole if flop.whole else 0.0,
        # At the end of a layer's first forward a trial recompute is compared with what was saved.
        forward_transient_bytes=measured.transients.forward.get(layer.name, 0)
        + (comparing_nbytes(max(storages, default=0)) if len(points) > 1 else 0),
        backward_transient_bytes=measured.transients.backward.get(layer.name, 0),
        static=sum((measured.static[parameter] for parameter in layer.module.parameters()), StaticBytes()),
        # For recompute the results of attention's two projections are kept too, which autograd need not save.
        storages=len(storages) + (2 if len(points) > 1 else 0),
        largest_storage_bytes=max(storages, default=0),
    )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
