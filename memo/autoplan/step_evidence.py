"""Evidence of one measured step for planning, and its merge over ranks that must use the same plan.

Recompute repeats a layer's collectives, so ranks that communicate within a layer must treat it alike. Each rank
measures its own steps; the plan is made of the slowest times, the slowest links, the smallest budgets, and the points
that all have.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol, TypeVar

from memo.autoplan.layer_classes import classes_of
from memo.autoplan.limits import Limits
from memo.mip.inputs import EmbeddingOrHeadProfile, LayerProfile, Profile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memo.mip.inputs import Hardware

_T = TypeVar("_T")

_RATES = (
    "d2h_bytes_per_s",
    "h2d_bytes_per_s",
    "duplex_bytes_per_s",
    "node_d2h_bytes_per_s",
    "node_h2d_bytes_per_s",
    "disk_write_bytes_per_s",
    "disk_read_bytes_per_s",
)
_OF_POINTS = ("saved_bytes", "beside_bytes", "recompute_s", "recompute_flops", "held_bytes")


class AllGather(Protocol):
    """Collects a value from all ranks that must use the same plan, in the same order on each. A collective call."""

    def __call__(self, value: _T, /) -> list[_T]:
        """Returns the values of all ranks; each rank must make the same calls in the same order."""


def single_rank(value: _T, /) -> list[_T]:
    """The AllGather of one rank."""
    return [value]


NOTHING_SAVED = "no layer saved a tensor of min_bytes or more: there is nothing to move"
"""A problem that costs nothing."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepEvidence:
    """Measurements of one step, on one rank or merged over several."""

    profile: Profile | None = None
    """None: `problem` says why."""
    hardware: Hardware | None = None
    """None: links were not measured in this step."""
    calls: int = 1
    """Most calls of one layer: the step's microbatches."""
    measured_s: float = 0.0
    """Seconds from the first forward to the end of the last backward."""
    peak_bytes: int = 0
    """Most bytes of saved tensors on the device at one time."""
    trials: int = 0
    """Trial recomputes in the step, which make it longer."""
    problem: str | None = None
    """Reason why the step shows nothing."""


def worst(found: Sequence[StepEvidence]) -> StepEvidence:
    """Merges evidence: slowest times, largest peak, slowest links; the first problem, if a rank has one."""
    problem = next((one.problem for one in found if one.problem is not None), None)
    if problem is not None:
        return StepEvidence(problem=problem)
    return StepEvidence(
        profile=_slowest([one.profile for one in found if one.profile is not None]),
        hardware=_narrowest([one.hardware for one in found if one.hardware is not None]),
        calls=max(one.calls for one in found),
        measured_s=max(one.measured_s for one in found),
        peak_bytes=max(one.peak_bytes for one in found),
        trials=max(one.trials for one in found),
    )


def least(limits: Sequence[Limits]) -> Limits:
    """Merges limits: the smallest budgets, the most other bytes."""
    return Limits(
        device_bytes=min(one.device_bytes for one in limits),
        others_bytes=max(one.others_bytes for one in limits),
        around_bytes=max(one.around_bytes for one in limits),
        beside_layers=tuple(map(max, zip(*(one.beside_layers for one in limits), strict=True))),
        beside_recomputes=tuple(map(max, zip(*(one.beside_recomputes for one in limits), strict=True))),
        absent_layers=tuple(map(min, zip(*(one.absent_layers for one in limits), strict=True))),
        host_bytes=min(one.host_bytes for one in limits),
        disk_bytes=min(one.disk_bytes for one in limits),
    )


def _slowest(profiles: Sequence[Profile]) -> Profile:
    if len(profiles) == 1:
        return profiles[0]
    layers = [_slowest_layer(alike) for alike in zip(*(one.layer_profiles() for one in profiles), strict=True)]
    classes, names = classes_of(layers)
    return dataclasses.replace(
        profiles[0],
        classes=classes,
        layers=names,
        embedding=_slowest_end([one.embedding for one in profiles]),
        head=_slowest_end([one.head for one in profiles]),
    )


def _slowest_layer(layers: Sequence[LayerProfile]) -> LayerProfile:
    """Merges one layer over ranks, with the points that all have; layers equal on one rank may differ on another."""
    points = []
    for known in layers[0].points:
        everywhere = [point for layer in layers if (point := layer.point(known.name)) is not None]
        if len(everywhere) == len(layers):
            most = {field: max(getattr(one, field) for one in everywhere) for field in _OF_POINTS}
            absent = min(one.absent_bytes for one in everywhere)
            points.append(dataclasses.replace(known, **most, absent_bytes=absent))
    return dataclasses.replace(
        layers[0],
        name=layers[0].name.partition("#")[0],
        always_bytes=max(layer.always_bytes for layer in layers),
        points=tuple(points),
        forward_s=max(layer.forward_s for layer in layers),
        backward_s=max(layer.backward_s for layer in layers),
        storages=max(layer.storages for layer in layers),
        largest_storage_bytes=max(layer.largest_storage_bytes for layer in layers),
    )


def _slowest_end(ends: Sequence[EmbeddingOrHeadProfile]) -> EmbeddingOrHeadProfile:
    return dataclasses.replace(ends[0], forward_s=max(end.forward_s for end in ends))


def _narrowest(machines: Sequence[Hardware]) -> Hardware | None:
    if not machines:
        return None
    rates = {field: min(getattr(machine, field) for machine in machines) for field in _RATES}
    return dataclasses.replace(machines[0], **rates)
