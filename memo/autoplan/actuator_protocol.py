"""Interface between the choice of plans and the engine that follows them, with the data types that both sides use.

memo.autoplan.controller decides; memo.autoplan.actuator applies.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from memo.swap import Level

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from memo.events import Lane, Tracer
    from memo.machine import LinkRates
    from memo.mip.activation import ActivationPlan
    from memo.swap import LayerCosts

__all__ = ["MEASURING", "ActuatorProtocol", "Limits"]


MEASURING = Level.SAVE_ATTENTION
"""Level of all layers while no plan is in use: attention outputs and layer inputs move, and the rest is recomputed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes that one rank's saved tensors may take in each tier, and what else the device holds."""

    device_bytes: int
    others_bytes: int
    """Most bytes of device memory in use for anything but saved tensors."""
    around_bytes: int = 0
    """Most device bytes beside saved tensors before, after and between the layers."""
    beside_layers: tuple[int, ...] = ()
    """Most such bytes while each layer runs; empty where only the whole step was measured."""
    beside_recomputes: tuple[int, ...] = ()
    """Most such bytes while each layer is recomputed, what the recompute holds included; 0 for those that were not."""
    host_bytes: int
    disk_bytes: int


class ActuatorProtocol(Protocol):
    """A manager's engine, as planning sees it: settings go in, measurements of steps come out."""

    @property
    def idle(self) -> bool:
        """True while nothing is saved: another setting may be applied."""

    @property
    def n_layers(self) -> int:
        """Number of managed layers."""

    @property
    def mlp_tiles(self) -> int:
        """Number of tiles in which the layers compute their MLP."""

    @property
    def codec(self) -> str | None:
        """Codec of what moves; None: it moves as it is."""

    def listen(self, tracer: Tracer | None) -> None:
        """Sends events to `tracer` from now on; None restores the run's own trace, if there is one."""

    def finish(self) -> None:
        """Waits for the device and delivers all events of the last step."""

    def now_ns(self) -> int:
        """Returns the clock of the engine's events, in nanoseconds."""

    def apply(self, setting: ActivationPlan | Level, *, growth: float = 1.0) -> None:
        """Applies a plan, or one level to all layers, for a next step with `growth` times the last one's tokens."""

    def plan_for(self, names: Collection[str]) -> None:
        """Sets the layers that plans are for, by name; () for all."""

    def host_excess(self, plan: ActivationPlan) -> int:
        """Bytes by which a plan's storages, whole and at addresses, exceed the host budget; 0 where they fit."""

    def prepare_host(self) -> None:
        """Begins to allocate the host memory that a plan of the last step's layers may use."""

    def costs(self) -> Mapping[str, LayerCosts]:
        """Costs by level of the layers that can be recomputed by tokens, by layer name."""

    def limits(self, growth: float = 1.0) -> Limits:
        """Budgets of saved tensors in a step with `growth` times the tokens of the last one."""

    def disk_rates(self) -> Mapping[Lane, float]:
        """Rates of the disks, measured alone, in bytes per second by lane; empty without disks."""

    def link(self) -> LinkRates | None:
        """Rates of the device's link, measured alone; None where they cannot be."""

    def spare_bytes(self) -> tuple[int, int]:
        """Bytes by which the device stayed below its budget since the last `take_peak` or `forget_peaks`.

        Negative above the budget. The first number is up to the end of backward, which a plan decides on; the second of
        all the time, an optimizer's step included.
        """

    def lacking_bytes(self) -> int:
        """Bytes by which every plan exceeds the device's budget, as far as the first forward shows; 0 or less: unknown."""

    def late_bytes(self, plan: ActivationPlan) -> int:
        """Bytes that the device may hold beside what a plan counts, since they are still on their way to the disk."""

    def why_infeasible(self) -> str:
        """Says what lacks these bytes, and the smallest budget that might do."""

    def unmeasured_bytes(self, *, first: bool, growth: float = 1.0) -> int:
        """Bytes of device memory that a plan leaves free, since no step has shown them; a `first` plan more than another."""

    def forget_peaks(self) -> None:
        """Ends a step that was only compared with the budget; the device's counters are left to the program."""

    def take_peak(self, *, growth: float | None = None) -> int:
        """Ends a measurement; returns the most bytes of saved tensors on the device at one time since the last call.

        The other device memory in use is noted for `limits`.

        Args:
            growth: None after a step at a level. After a step by a plan, its tokens as a multiple of those of the
                step noted before; that step's bytes still count where they are more, since another plan may recompute
                more.
        """

    def watch(self, *, closely: bool) -> None:
        """Measures device memory layer by layer from now on, or over whole steps."""

    def take_lacking(self) -> tuple[int, int]:
        """Bytes since the last call that were to go to the host and to the disk, and that no tier had room for."""

    def repeated(self) -> Collection[str]:
        """Layers that the last step recomputed whole, whatever their setting."""

    def take_trials(self) -> int:
        """Number of trial recomputes since the last call."""

    def restart_peaks(self) -> None:
        """Forgets the peaks so far: the next `take_peak` is about what comes after this call."""
