"""Conversion of one measured step to the planner's input: a profile of the model and a description of the machine.

Owns the arithmetic from the times of a step (memo.autoplan.step_timeline) and the layers' costs by point
(memo.swap.levels) to Profile and Hardware (memo.mip.inputs). Measures nothing itself.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING

from memo.autoplan.layer_classes import classes_of, points_of
from memo.errors import PlanError
from memo.events import Lane, StallCause
from memo.mip.inputs import (
    ALL,
    ATTENTION,
    CODE_BYTES,
    MATMULS,
    AttentionKernel,
    Coding,
    EmbeddingOrHeadProfile,
    Hardware,
    LayerProfile,
    PointProfile,
    Profile,
    Role,
    Signature,
    StaticBytes,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from memo.autoplan.limits import Limits
    from memo.autoplan.step_timeline import LayerTimes, StepTimes
    from memo.machine import LinkRates
    from memo.swap import LayerCosts

_SHARED = 0.75
"""Part of the link's rate beside copies out below which a step's copies back show that others use it, too."""
_TELLING_BYTES = 1 << 28
"""Fewest bytes of copies back from which their rate is taken."""
_NO_BOUND = 1e15
"""Rate of a lane that the step did not use, in bytes per second: never what a plan waits for."""

_WAITS_IN_FORWARD = (StallCause.DRAIN, StallCause.HOST_FULL, StallCause.DISK_QUEUE)

ALIKE = 0.05
"""Layers are one class if the memory beside them differs by at most this fraction of the largest layer's bytes."""


def measured_profile(
    times: StepTimes,
    costs: Mapping[str, LayerCosts],
    signature: Signature,
    *,
    mlp_tiles: int = 1,
    codec: str | None = None,
    is_measuring: bool = False,
    repeated: Collection[str] = (),
) -> Profile:
    """Makes a profile from the times of one step.

    Args:
        times: the step's times, layer by layer.
        costs: costs by point, for layers that can be recomputed; the other layers have point `all` only.
        signature: batch shape of the step.
        mlp_tiles: tiles in which the layers compute their MLP.
        codec: codec of what moves; its time in the step is a part of the layers' own.
        is_measuring: all layers were at MEASURING: the recomputes are taken as they ran, not as tried out.
        repeated: layers that were recomputed whole all the same, for lack of room.

    Raises:
        PlanError: a layer ran forward without backward.
    """
    layers = [_layer(name, layer, costs.get(name)) for name, layer in times.layers.items()]
    if codec is not None:
        layers = [_coded(layer, own) for layer, own in zip(layers, times.layers.values(), strict=True)]
    if is_measuring:
        layers = _recomputed(layers, times, repeated)
    classes, names = classes_of(layers)
    head_ns = times.turn_ns[1] - times.turn_ns[0]
    forward_ns, backward_ns = _between_ns(times)  # the ends': it does not grow with attention
    return Profile(
        signature=signature,
        role=Role.MEASURED,
        classes=classes,
        layers=names,
        embedding=EmbeddingOrHeadProfile(forward_s=(max(0, times.first_layer_ns - times.begin_ns) + forward_ns) / 1e9),
        head=EmbeddingOrHeadProfile(forward_s=(max(0, head_ns) + backward_ns) / 1e9),
        mlp_tiles=mlp_tiles,
        codec=codec,
    )


def _coded(layer: LayerProfile, times: LayerTimes) -> LayerProfile:
    """The layer with what codes spare of it: the share that they spare of all its storages."""
    share = times.spared_bytes / times.saved_bytes if times.saved_bytes else 0.0
    return dataclasses.replace(layer, coding=Coding(spared_bytes=int(share * layer.full_bytes)))


def _between_ns(times: StepTimes) -> tuple[int, int]:
    """Time between the layers' forwards and between their backwards, such as that of FSDP's copies.

    0 where several microbatches or calls mix, between which a pipeline waits, and for waits of the offload itself.
    """
    own = times.layers.values()
    end, begin = times.turn_ns
    if end > begin or any(layer.calls > 1 for layer in own):
        return 0, 0
    waits = sum(times.stalls_ns.get(cause, 0) for cause in _WAITS_IN_FORWARD)
    forward = end - times.first_layer_ns - sum(layer.forward_ns for layer in own) - waits
    backward = times.end_ns - begin - sum(layer.backward_ns for layer in own)
    return max(0, forward), max(0, backward)


def _layer(name: str, times: LayerTimes, costs: LayerCosts | None) -> LayerProfile:
    if not times.calls or not times.backward_ns:
        raise PlanError(f"{name} ran {times.calls} forwards and no backward in the step that was measured")
    calls = times.calls
    # What is absent at a backward's peak is measured (`beside_layers`): this layer may run its parts in another order.
    points = () if costs is None else tuple(dataclasses.replace(each, absent_bytes=0) for each in points_of(costs))
    return LayerProfile(
        name="layer",
        always_bytes=0,
        points=points or (PointProfile(name=ALL, saved_bytes=times.saved_bytes // calls),),
        forward_s=times.forward_ns / calls / 1e9,
        backward_s=times.own_backward_ns / calls / 1e9,
        storages=-(-times.storages // calls),
        largest_storage_bytes=times.largest_storage_bytes,
    )


def _recomputed(layers: Sequence[LayerProfile], times: StepTimes, repeated: Collection[str]) -> list[LayerProfile]:
    """Layers whose recomputes take what they took in the step: a trial, which compares what it computes, takes longer."""

    def taken(layer: LayerProfile, measured: LayerTimes) -> float | None:
        tried = layer.point(ATTENTION) or layer.point(MATMULS)  # where both save the same
        if tried is None or not tried.recompute_s or not measured.recompute_ns:
            return None
        return measured.recompute_ns / measured.calls / 1e9 / tried.recompute_s

    shares = [
        None if name in repeated else taken(layer, measured)
        for layer, (name, measured) in zip(layers, times.layers.items(), strict=True)
    ]
    found = list(layers)
    for alike in _by_class(layers):
        known = [share for number in alike if (share := shares[number]) is not None]
        for number in alike if known else ():
            points = (
                dataclasses.replace(point, recompute_s=point.recompute_s * statistics.median(known))
                for point in layers[number].points
            )
            found[number] = dataclasses.replace(layers[number], points=tuple(points))
    return found


def _by_class(layers: Sequence[LayerProfile]) -> list[list[int]]:
    """Numbers of the layers of each class."""
    numbers: dict[str, list[int]] = {}
    for number, name in enumerate(classes_of(layers)[1]):
        numbers.setdefault(name, []).append(number)
    return list(numbers.values())


def beside_layers(profile: Profile, limits: Limits) -> tuple[Profile, int]:
    """Adds the device memory in use beside saved tensors to a profile, as transient bytes of each layer.

    It differs by layer, since gradients are allocated layer by layer while saved tensors are released. Layers with
    about the same bytes remain one class, which a plan treats alike.

    A plan counts what its recompute holds above the transients of backward. So points hold here what they hold above those:
    the transients come after the recompute, which begins with less. By then what only the recompute is given is gone, which
    the measured peak of saved tensors counts.

    Returns:
        The profile, and the bytes that are in use whichever layer runs; its transients are the bytes above that.
    """
    if not limits.beside_layers:
        return profile, limits.others_bytes
    beside, known = limits.beside_layers, profile.layer_profiles()
    recomputes, absent = (each or (0,) * len(beside) for each in (limits.beside_recomputes, limits.absent_layers))
    most = max(layer.full_bytes for layer in known)
    if max(absent) - min(absent) <= ALIKE * most:
        absent = (min(absent),) * len(absent)
    beside, recomputes = (
        (max(each),) * len(each) if max(each) - min(each) <= ALIKE * most else each for each in (beside, recomputes)
    )
    always = min(limits.around_bytes, *beside)
    each = {
        key: dataclasses.replace(
            layer,
            name="+".join(map(str, (layer.name, key[1] - always, *key[2:]))),
            forward_transient_bytes=key[1] - always + _codes_bytes(layer),
            backward_transient_bytes=_after_recompute(layer, key, always) - always + _codes_bytes(layer),
            points=_with_absent(_held_above(layer, _after_recompute(layer, key, always), key[2]), key[3]),
        )
        for layer, key in zip(known, _keys(known, beside, recomputes, absent), strict=True)
    }
    around = limits.around_bytes - always
    return dataclasses.replace(
        profile,
        classes=tuple(each.values()),
        layers=tuple(each[key].name for key in _keys(known, beside, recomputes, absent)),
        embedding=dataclasses.replace(profile.embedding, transient_bytes=around),
        head=dataclasses.replace(profile.head, transient_bytes=around),
    ), always


def saved_alone(profile: Profile) -> Profile:
    """Returns the layers' profile without the device memory that is not of their saved tensors and recomputes."""

    def bare(layer: LayerProfile) -> LayerProfile:
        return dataclasses.replace(
            layer,
            static=StaticBytes(),
            forward_transient_bytes=0,
            backward_transient_bytes=0,
            forward_gathered_bytes=0,
            backward_gathered_bytes=0,
            between_bytes=0,
        )

    return dataclasses.replace(
        profile,
        classes=tuple(bare(layer) for layer in profile.classes),
        embedding=EmbeddingOrHeadProfile(),
        head=EmbeddingOrHeadProfile(),
        send_bytes=0.0,
    )


def _codes_bytes(layer: LayerProfile) -> int:
    """Most bytes of the codes of two layers, which are on the device on their way; of 16-bit values no fewer are codes."""
    return int(2 * layer.coding.spared_bytes * CODE_BYTES / (2 - CODE_BYTES)) if layer.coding is not None else 0


def _keys(known: Sequence[LayerProfile], *nbytes: Sequence[int]) -> list[tuple[str, int, int, int]]:
    return [(layer.name, *each) for layer, *each in zip(known, *nbytes, strict=True)]


def _after_recompute(layer: LayerProfile, key: tuple[str, int, int, int], always: int) -> int:
    """Device memory beside all that autograd saves of a layer, after its recompute."""
    point = _measured_point(layer)
    if not key[2]:  # what the recompute held is among it, and a plan counts it by itself
        return max(always, key[1] - point.held_bytes)
    return key[1] + point.beside_bytes


def _measured_point(layer: LayerProfile) -> PointProfile:
    return layer.point(ATTENTION) or layer.points[-1]


def _with_absent(points: tuple[PointProfile, ...], nbytes: int) -> tuple[PointProfile, ...]:
    """The points, of which the measured one lacks these bytes at its backward's peak."""
    measured = next((point.name for point in points if point.name == ATTENTION), points[-1].name)
    return tuple(
        dataclasses.replace(point, absent_bytes=nbytes) if point.name == measured and point.recompute_s else point
        for point in points
    )


def _held_above(layer: LayerProfile, beside: int, while_recomputing: int) -> tuple[PointProfile, ...]:
    """The points with the bytes that their recomputes hold above the transients of backward.

    Args:
        layer: as it was measured.
        beside: device memory beside its saved tensors in its forward and backward.
        while_recomputing: the same while it was recomputed in the measured step; 0: it was not.
    """
    begins = while_recomputing - _measured_point(layer).held_bytes if while_recomputing else beside
    return tuple(
        dataclasses.replace(point, held_bytes=max(0, begins + point.held_bytes - beside) if point.recompute_s else 0)
        for point in layer.points
    )


def scaled_profile(profile: Profile, signature: Signature) -> Profile:
    """Predicts the profile of another batch shape from a measured one.

    Bytes, and the time of everything but attention, are linear in the tokens of the batch; attention's time is also
    proportional to the sequence length. The recompute at point `attention` is the forward without attention, so the rest
    of the forward's time is taken as attention's. Backward is split by the same ratio.
    """
    before = profile.signature
    linear = (signature.batch * signature.tokens) / (before.batch * before.tokens)
    square = linear * signature.tokens / before.tokens

    def layer(known: LayerProfile) -> LayerProfile:
        attention = known.point(ATTENTION)
        again = known.forward_s if attention is None else attention.recompute_s
        repeatable = min(again, known.forward_s) / known.forward_s if known.forward_s else 1.0
        factor = repeatable * linear + (1 - repeatable) * square
        return dataclasses.replace(
            known,
            always_bytes=round(known.always_bytes * linear),
            between_bytes=round(known.between_bytes * linear),
            points=_scaled_points(known, linear),
            forward_s=known.forward_s * factor,
            backward_s=known.backward_s * factor,
            coding=None if known.coding is None else Coding(spared_bytes=int(known.coding.spared_bytes * linear)),
            largest_storage_bytes=round(known.largest_storage_bytes * linear),
        )

    def end(known: EmbeddingOrHeadProfile) -> EmbeddingOrHeadProfile:
        return dataclasses.replace(
            known, forward_s=known.forward_s * linear, saved_bytes=round(known.saved_bytes * linear)
        )

    return dataclasses.replace(
        profile,
        signature=signature,
        role=Role.DERIVED,
        classes=tuple(layer(known) for known in profile.classes),
        embedding=end(profile.embedding),
        head=end(profile.head),
    )


def _scaled_points(layer: LayerProfile, factor: float) -> tuple[PointProfile, ...]:
    """Points of more or fewer tokens; those that then save as much as the one before are left out."""
    found: list[PointProfile] = []
    for point in layer.points:
        nbytes = round(point.saved_bytes * factor)
        if not found or nbytes < found[-1].saved_bytes:
            found.append(
                dataclasses.replace(
                    point,
                    saved_bytes=nbytes,
                    beside_bytes=round(point.beside_bytes * factor),
                    recompute_s=point.recompute_s * factor,
                    recompute_flops=point.recompute_flops * factor,
                    held_bytes=round(point.held_bytes * factor),
                    absent_bytes=point.absent_bytes if factor >= 1 else 0,
                )
            )
    return tuple(found)


def seconds_of(profile: Profile) -> float:
    """Seconds of one microbatch: forward and backward of all layers, embedding and head."""
    layers = sum(layer.forward_s + layer.backward_s for layer in profile.layer_profiles())
    return layers + profile.embedding.forward_s + profile.head.forward_s


def measured_hardware(
    times: StepTimes,
    *,
    device_bytes: int,
    host_bytes: int,
    link: LinkRates | None = None,
    disks: Mapping[Lane, float] | None = None,
) -> Hardware:
    """Describes the machine as one rank measured it, while the node's other ranks worked: rates are not divided again.

    Args:
        times: a step, for the rates that its copies reached.
        device_bytes: this rank's device budget.
        host_bytes: this rank's host budget.
        link: rates of the device's link, measured alone; None takes those of the step's copies. Copies back that were much
            slower in the step shared it with others (parameters that FSDP or an optimizer keeps on the host, other ranks);
            copies out may have waited for host memory to be pinned, and show nothing.
        disks: rates of the disks, measured alone, for those that the step did not use; without them these have rate 0.
    """
    rates = dict(disks or {}) | {lane: use.bytes_per_s for lane, use in times.lanes.items() if use.nbytes}
    out, back = rates.get(Lane.D2H, _NO_BOUND), rates.get(Lane.H2D, _NO_BOUND)
    both = out + back
    if link is not None:
        out, back = link.d2h_bytes_per_s, link.h2d_bytes_per_s
        together = link.h2d_together_bytes_per_s
        both = link.d2h_together_bytes_per_s + together
        reached = times.lanes.get(Lane.H2D)
        if reached is not None and reached.nbytes >= _TELLING_BYTES and reached.bytes_per_s < _SHARED * together:
            back = reached.bytes_per_s
            both = max(both - together + back, out)
    write = rates.get(Lane.DISK_WRITE, 0.0)
    return Hardware(
        name="measured",
        peak_flops=1.0,  # a measured profile has seconds; nothing is derived from a peak
        matmul_efficiency=1.0,
        attention=(AttentionKernel.alike(1.0),),
        device_bytes=device_bytes,
        hbm_bytes_per_s=1.0,
        d2h_bytes_per_s=out,
        h2d_bytes_per_s=back,
        duplex_bytes_per_s=both,
        node_d2h_bytes_per_s=out,
        node_h2d_bytes_per_s=back,
        nvlink_bytes_per_s=0.0,
        gpus_per_node=1,
        host_bytes=host_bytes,
        disk_write_bytes_per_s=write,
        disk_read_bytes_per_s=rates.get(Lane.DISK_READ, write),
    )
