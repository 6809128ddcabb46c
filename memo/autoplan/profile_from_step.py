"""From one measured step to what planning needs: a profile of the model, a description of the machine.

Owns the arithmetic between the engine's figures (memo.autoplan.step_timeline), a layer's costs by level
(memo.swap.token_levels) and the planner's nouns (memo.mip.inputs.profile, memo.mip.inputs.hardware). Nothing is
measured here.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memo.autoplan.layer_classes import classes_of, levels_of
from memo.errors import PlanError
from memo.events import Lane
from memo.mip.inputs import EndProfile, Hardware, LayerProfile, Level, LevelProfile, Profile, Role, Signature

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memo.autoplan.actuator_protocol import Limits
    from memo.autoplan.step_timeline import LayerTimes, StepTimes
    from memo.swap import LayerCosts

__all__ = ["beside_layers", "measured_hardware", "measured_profile", "scaled_profile", "seconds_of"]

# A lane that nobody measured because nothing crosses it: never what a plan waits for.
_NO_BOUND = 1e15

ALIKE = 0.05
"""Of a layer's bytes: what stands beside layers may differ by so much, and they are one class all the same."""


def measured_profile(
    times: StepTimes, costs: Mapping[str, LayerCosts], signature: Signature, *, mlp_tiles: int = 1
) -> Profile:
    """What one step showed of each layer.

    `costs` has the layers that can be treated token by token; of the others only whole tensors are known.

    Raises:
        PlanError: a layer ran forward and not backward, or not at all.
    """
    classes, names = classes_of([_layer(name, layer, costs.get(name)) for name, layer in times.layers.items()])
    head_ns = times.turn_ns[1] - times.turn_ns[0]
    return Profile(
        signature=signature,
        role=Role.MEASURED,
        classes=classes,
        layers=names,
        embedding=EndProfile(forward_s=max(0, times.first_layer_ns - times.begin_ns) / 1e9),
        head=EndProfile(forward_s=max(0, head_ns) / 1e9),
        mlp_tiles=mlp_tiles,
    )


def _layer(name: str, times: LayerTimes, costs: LayerCosts | None) -> LayerProfile:
    if not times.calls or not times.backward_ns:
        raise PlanError(f"{name} ran {times.calls} forwards and no backward in the step that was measured")
    calls = times.calls
    always_bytes = 0
    levels: tuple[LevelProfile, ...] = (LevelProfile(level=Level.SAVE_ALL, saved_bytes=times.saved_bytes // calls),)
    if costs is not None and len(costs.recompute_s_per_token) > 1:  # beside SAVE_ALL, so a recompute was accepted
        always_bytes, levels = costs.always_bytes, levels_of(costs)
    return LayerProfile(
        name="layer",
        always_bytes=always_bytes,
        levels=levels,
        forward_s=times.forward_ns / calls / 1e9,
        backward_s=max(times.backward_ns - times.recompute_ns - times.waited_ns, 0) / calls / 1e9,
        storages=-(-times.storages // calls),
        largest_storage_bytes=times.largest_storage_bytes,
    )


def beside_layers(profile: Profile, limits: Limits) -> tuple[Profile, int]:
    """The profile with what else the device holds while each layer runs, and how much of that it holds whichever runs.

    Gradients come layer by layer, when what is kept has begun to go. Layers beside which about as much stands remain alike,
    and a plan treats them alike.
    """
    if not limits.beside_layers:
        return profile, limits.others_bytes
    beside, known = limits.beside_layers, profile.layer_profiles()
    if max(beside) - min(beside) <= ALIKE * max(layer.full_bytes for layer in known):
        beside = (max(beside),) * len(beside)
    always = min(limits.around_bytes, *beside)
    each = {
        (layer.name, nbytes): dataclasses.replace(
            layer,
            name=f"{layer.name}+{nbytes - always}",
            forward_transient_bytes=nbytes - always,
            backward_transient_bytes=nbytes - always,
        )
        for layer, nbytes in zip(known, beside, strict=True)
    }
    around = limits.around_bytes - always
    return dataclasses.replace(
        profile,
        classes=tuple(each.values()),
        layers=tuple(each[layer.name, nbytes].name for layer, nbytes in zip(known, beside, strict=True)),
        embedding=dataclasses.replace(profile.embedding, transient_bytes=around),
        head=dataclasses.replace(profile.head, transient_bytes=around),
    ), always


def scaled_profile(profile: Profile, signature: Signature) -> Profile:
    """What a step of another batch or length is expected to show, until it is measured itself.

    Bytes grow with the tokens of the batch, and so does the time of everything but attention, which grows with the length
    once more. What is recomputed at the last level is all but attention: the rest of the forward counts as attention's.
    """
    before = profile.signature
    linear = (signature.batch * signature.tokens) / (before.batch * before.tokens)
    square = linear * signature.tokens / before.tokens

    def layer(known: LayerProfile) -> LayerProfile:
        again = next(
            (level.recompute_s for level in known.levels if level.level is Level.SAVE_ATTENTION), known.forward_s
        )
        token_wise = min(again, known.forward_s) / known.forward_s if known.forward_s else 1.0
        factor = token_wise * linear + (1 - token_wise) * square
        return dataclasses.replace(
            known,
            always_bytes=round(known.always_bytes * linear),
            between_bytes=round(known.between_bytes * linear),
            levels=tuple(
                dataclasses.replace(
                    level,
                    saved_bytes=round(level.saved_bytes * linear),
                    beside_bytes=round(level.beside_bytes * linear),
                    recompute_s=level.recompute_s * linear,
                )
                for level in known.levels
            ),
            forward_s=known.forward_s * factor,
            backward_s=known.backward_s * factor,
            largest_storage_bytes=round(known.largest_storage_bytes * linear),
        )

    def end(known: EndProfile) -> EndProfile:
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


def seconds_of(profile: Profile) -> float:
    """All of its layers' forwards and backwards, and both ends."""
    layers = sum(layer.forward_s + layer.backward_s for layer in profile.layer_profiles())
    return layers + profile.embedding.forward_s + profile.head.forward_s


def measured_hardware(
    times: StepTimes, *, device_bytes: int, host_bytes: int, link: tuple[float, float, float] | None = None
) -> Hardware:
    """The machine as a rank saw it while all of its node's ranks were at work, so nothing is shared once more.

    `link` has bytes per second out, in, and both ways at once, where they were measured on their own; otherwise they are
    what the step's copies reached. A disk that the step did not use is no lane.
    """
    rates = {lane: use.bytes_per_s for lane, use in times.lanes.items() if use.nbytes}
    out, back = rates.get(Lane.D2H, _NO_BOUND), rates.get(Lane.H2D, _NO_BOUND)
    both = out + back
    if link is not None:
        out, back, both = link
    write = rates.get(Lane.DISK_WRITE, 0.0)
    return Hardware(
        name="measured",
        peak_flops=1.0,  # a measured profile has seconds; nothing is derived from a peak
        matmul_efficiency=1.0,
        attention_efficiency=1.0,
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
