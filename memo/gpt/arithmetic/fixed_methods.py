"""Fixed methods of recompute: every layer at one point of its curve, or at its input alone, whatever fits.

Owns what a method leaves of a layer's profile. Bytes and times are the profile's own, so a plan of points and a fixed
method that keep the same have the same peak and step. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import enum

from memo.mip.inputs import LayerProfile, PointProfile


class RecomputeMethod(enum.StrEnum):
    """What every layer computes again in backward."""

    NONE = "none"
    SELECTIVE = "selective"
    """Attention's scores (Korthikanti et al. 2022), which fused attention never saves: the same point as `none`."""
    FULL = "full"
    """The layer, from its input."""

    def of(self, layer: LayerProfile, *, input_bytes: int) -> LayerProfile:
        """The layer at the method's point alone; what is computed again counts as a part of backward.

        Args:
            layer: at all its points.
            input_bytes: of its saved bytes, those of its input.
        """
        whole = dataclasses.replace(layer, points=layer.points[:1])
        if self is not RecomputeMethod.FULL:
            return whole
        again = max(whole.full_bytes - input_bytes, 0)
        return dataclasses.replace(
            whole,
            always_bytes=input_bytes,
            other_bytes=0,
            points=(PointProfile(name=whole.points[0].name, saved_bytes=0),),
            backward_s=whole.backward_s + whole.forward_s,
            backward_flops=whole.backward_flops + whole.forward_flops,
            backward_exchange_s=whole.backward_exchange_s + whole.forward_exchange_s,
            forward_transient_bytes=whole.forward_transient_bytes + again,
            backward_transient_bytes=whole.backward_transient_bytes + again,
            storages=1,
            largest_storage_bytes=input_bytes,
        )
