"""What planning at run time is carried out on: the interface between the choice of a plan and the engine that follows it.

Owns the nouns that both sides speak. memo.autoplan.controller decides, memo.autoplan.actuator carries out.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memo.events import Tracer
    from memo.mip.activation import ActivationPlan
    from memo.swap import LayerCosts

__all__ = ["MEASURING", "SAFEST", "ActuatorProtocol", "Limits", "Setting"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is in force where no plan is: everything moves that is not recomputed, and all but attention is recomputed."""

    matmuls: float = 0.0
    """Of the tokens: the results of their matrix products move, too."""
    rest_stays: bool = False
    """What no tier has room for stays on the device while that keeps its budget, as a plan may have it. Else an error."""


SAFEST = Setting()
MEASURING = Setting(rest_stays=True)
"""The safest as long as a plan may come."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes for saved tensors, of one rank; `others_bytes` of device memory are in use for everything else, at the most."""

    device_bytes: int
    others_bytes: int
    around_bytes: int = 0
    """Of these, before, behind and between the layers."""
    beside_layers: tuple[int, ...] = ()
    """The same while each layer runs; empty where nobody knows."""
    host_bytes: int
    disk_bytes: int


class ActuatorProtocol(Protocol):
    """What a plan is carried out on."""

    @property
    def idle(self) -> bool:
        """Nothing is saved now: another setting may come into force."""

    @property
    def n_layers(self) -> int:
        """Of the model."""

    @property
    def mlp_tiles(self) -> int:
        """In how many tiles the model's layers compute their MLP."""

    def listen(self, tracer: Tracer | None) -> None:
        """Tells `tracer` of everything from now on; None goes back to what was listened with before."""

    def finish(self) -> None:
        """Everything of the last step has happened and been told."""

    def use(self, setting: ActivationPlan | Setting, *, growth: float = 1.0) -> None:
        """Brings a plan into force, or one of the settings before it; for `growth` times the last step's tokens."""

    def spare_share(self, peak_bytes: int, calls: int) -> float:
        """The share of tokens, a half at most, whose matrix products there is room for beside what the last step held.

        It was at the safest setting, had `calls` of each layer in flight, and `peak_bytes` on the device.
        """

    def costs(self) -> Mapping[str, LayerCosts]:
        """Of the layers that can be treated token by token, by name."""

    def limits(self, growth: float = 1.0) -> Limits:
        """What a plan may use of a step with `growth` times the tokens of the last one."""

    def link(self) -> tuple[float, float, float] | None:
        """Bytes per second out, in and both ways of a link that was measured on its own."""

    def excess_bytes(self) -> int:
        """By how much the device was above its budget since the last `take_peak`."""

    def take_peak(self, *, growth: float | None = None) -> int:
        """The most bytes of saved tensors that the device had at once since the last call.

        What else it had counts for limits from now on. With `growth` a plan was in force, and another one may compute more
        again: what steps of one `growth`-th of the tokens had counts still, if it is more.
        """

    def watch(self, *, closely: bool) -> None:
        """Looks from now on at each layer's device memory by itself, or at that of whole steps."""

    def take_trials(self) -> int:
        """How many recomputes were tried out since the last call."""

    def restart_peaks(self) -> None:
        """The next `take_peak` is to tell of what comes after this alone."""
