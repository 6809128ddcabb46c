"""The machine's speed in a measured step, beside that of a profile; and a profile with a later step's times."""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING

from memo.autoplan.profile_from_step import seconds_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memo.mip.inputs import LayerProfile, Profile


def speed_of(profile: Profile, measured: Profile) -> float:
    """Plain compute of a measured step, without waits and recompute, as a multiple of the profile's."""
    return seconds_of(measured) / seconds_of(profile)


def steadier(profile: Profile, samples: Sequence[Profile]) -> tuple[Profile, bool]:
    """The sample whose speed is nearest to the profile's, and whether all are slower, or all faster, than that."""
    speeds = [speed_of(profile, sample) for sample in samples]
    nearest = min(range(len(samples)), key=lambda number: abs(speeds[number] - 1))
    return samples[nearest], len({speed > 1 for speed in speeds}) == 1


def corrected(profile: Profile, measured: Profile) -> Profile:
    """Returns the profile with the times of a later step and its own bytes: a layer that is kept shows no levels.

    Recompute was timed at the speed of the step that was profiled, and is scaled to that of this one.
    """
    fresh = measured.layer_profiles()
    by_class: dict[str, list[tuple[float, float]]] = {}
    for name, layer in zip(profile.layers, fresh, strict=True):
        by_class.setdefault(name, []).append((layer.forward_s, layer.backward_s))

    def scaled(known: LayerProfile) -> LayerProfile:
        forward_s, backward_s = (statistics.fmean(seconds) for seconds in zip(*by_class[known.name], strict=True))
        before_s = known.forward_s + known.backward_s
        speed = (forward_s + backward_s) / before_s if before_s else 1.0
        return dataclasses.replace(
            known,
            forward_s=forward_s,
            backward_s=backward_s,
            points=tuple(dataclasses.replace(point, recompute_s=point.recompute_s * speed) for point in known.points),
        )

    return dataclasses.replace(
        profile,
        role=measured.role,
        classes=tuple(scaled(known) for known in profile.classes),
        embedding=measured.embedding,
        head=measured.head,
    )
